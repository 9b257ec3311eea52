"""Tiles of segments, enumerated on the device from offsets alone.

A segment is the run of rows below one coarse row; seen as `n_seed` folded rows a row, segment c
covers the folded rows `[offsets[c] * n_seed, offsets[c + 1] * n_seed)`. Tiles have T folded rows
and are cut relative to their segment's first row, so that what a tile does is the same in any batch
(contract 4). The rows beyond the live count form one more segment, number `segments`: whoever gets
a tile of it writes zeros (contract 9).

Which tile is which needs no prefix sum over `ceil(length / T)`: give segment c the tile numbers
from

    start(c) = floor(offsets[c] * n_seed / T) + c

on. `start(c + 1) - start(c)` is `ceil(length / T)` or one more, since
`ceil((b - a) / T) <= floor(b / T) - floor(a / T) + 1`, and `start` of the end is `floor(rows *
n_seed / T) + segments + 1` whatever the lengths: what the host launches, and no more than a grid
for the worst case of an exact prefix sum must have, too. So no launch and no memory go before, and
a tile finds its segment by searching `start`. A number too many in a segment is an empty tile.

    segments of 5, 0 and 2 rows, 8 rows allocated, T = 4:  start = 0, 2, 3; dead rows: 4; end: 6
    tile:   0         1      2      3         4      5
    rows:   0 to 3    4      none   5 and 6   7      none
    of:     0         0      1      2         dead   dead

Launch `tile_count(...)` programs (or loop over as many) on grid x; in the kernel

    segment, first, end = find_tile(offsets_ptr, segments, rows, tile, n_seed, T)
    if first >= end: return                    # an empty tile
    if segment == segments: zeros to rows first .. min(first + T, end); return
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


def tile_count(rows: int, segments: int, n_seed: int, T: int) -> int:
    """How many tiles there may be, from allocated sizes alone (no more are ever in use).

    Args:
        rows: allocated rows of the fine level.
        segments: allocated rows of the coarse level.
        n_seed: folded rows a row.
        T: folded rows a tile.
    """
    return rows * n_seed // T + segments + 1


@triton.jit
def find_tile(offsets_ptr, segments, rows, tile, n_seed, T: tl.constexpr):
    """Which rows tile number `tile` has.

    Args:
        offsets_ptr: [segments + 1] int32, first row of each segment, then the live row count. Where
            the first is not 0, tiles with numbers below its own are of segment 0 and begin ahead of
            it.
        segments: number of segments.
        rows: allocated rows.
        tile: below `tile_count(rows, segments, n_seed, T)`.
        n_seed: folded rows a row.
        T: folded rows a tile.

    Returns:
        The segment (`segments` for dead rows), the tile's first folded row, and the end of the
        segment's folded rows, both int64. The tile has `[first, min(first + T, end))`: nothing
        where first >= end. Folded row f is row f // n_seed (a position in `order` where the tree
        is unsorted; dead rows always lie last).
    """
    segment = _last_at_most(offsets_ptr, segments + 1, tile, n_seed, T, 1)
    begin = tl.load(offsets_ptr + segment).to(tl.int64) * n_seed
    stop = tl.load(offsets_ptr + segment + 1, mask=segment < segments, other=rows)
    first = begin + (tile - (begin // T + segment)) * T
    return segment, first, stop.to(tl.int64) * n_seed


@triton.jit
def find_segment(offsets_ptr, segments, row):
    """The segment that has the row: the largest c < segments with `offsets[c] <= row`.

    Args:
        offsets_ptr: [segments + 1] int32, offsets[0] = 0.
        segments: number of segments, at least 1.
        row: a row, not negative.
    """
    return _last_at_most(offsets_ptr, segments, row, 1, 1, 0)


@triton.jit
def _last_at_most(
    offsets_ptr,
    count,
    value,
    n_seed,
    T: tl.constexpr,
    EACH: tl.constexpr,
    LANES: tl.constexpr = 128,
):
    """The largest i < count with `offsets[i] * n_seed // T + i * EACH <= value`; 0 if none is.

    Every step asks at LANES places at once: two dependent loads for 16,384 segments, where a
    binary search has 14.
    """
    low = 0
    left = count
    while left > 1:
        step = tl.cdiv(left, LANES)
        place = tl.arange(0, LANES) * step
        inside = place < left
        offsets = tl.load(offsets_ptr + low + place, mask=inside, other=0).to(tl.int64)
        keys = offsets * n_seed // T + (low + place) * EACH
        passed = tl.sum((inside & (keys <= value)).to(tl.int32))
        below = tl.maximum(passed - 1, 0) * step
        low += below
        left = tl.minimum(step, left - below)
    return low
