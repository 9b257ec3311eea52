"""Which query rows and keys a tile of the Hopper attention kernel has, found by one warp."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.target_attention.gluon_device import TILE

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
SCAN = gl.constexpr(256)
"""Segments looked at together in search of long ones."""
LINE = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))


@gluon.jit
def _last_at_most(offsets_ptr, segments, tile, n_seed):
    """The segment of a tile: see triton_tiles, which counts tiles in the same way."""
    low = 0
    left = segments + 1
    while left > 1:
        step = gl.cdiv(left, 32)
        place = gl.arange(0, 32, LANES) * step
        inside = place < left
        offsets = gl.load(offsets_ptr + low + place, mask=inside, other=0)
        keys = offsets * n_seed // TILE + low + place
        passed = gl.sum((inside & (keys <= tile)).to(gl.int32), 0)
        below = (passed - 1) * step
        low += below
        left = gl.minimum(step, left - below)
    return low


@gluon.jit
def find_rows(tree, tile):
    """Which rows a tile has.

    Returns:
        The segment (`segments` for dead rows), its first row, the tile's first folded row and the
        segment's end, both counted from there: nothing where first >= end.
    """
    offsets_ptr, live_ptr, rows, segments, n_seed = tree
    if offsets_ptr is None:
        each = gl.cdiv(n_seed, TILE)
        begin = tile // each
        live = rows if live_ptr is None else gl.load(live_ptr)
        segment = gl.where(begin < live, begin, segments)
        first = (tile - begin * each) * TILE
        end = n_seed
    else:
        segment = _last_at_most(offsets_ptr, segments, tile, n_seed)
        begin = gl.load(offsets_ptr + segment)
        stop = gl.load(offsets_ptr + segment + 1, mask=segment < segments, other=rows)
        first = (tile - (begin * n_seed // TILE + segment)) * TILE
        end = (stop - begin) * n_seed
    return segment, begin, first, end


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _long_tiles(offsets_ptr, segments, base, n_seed, FEW: gl.constexpr):
    """Tiles of SCAN segments from `base` on, added up: none of those of up to FEW folded rows."""
    at = base + gl.arange(0, SCAN, LINE)
    begin = gl.load(offsets_ptr + at, mask=at < segments, other=0)
    stop = gl.load(offsets_ptr + at + 1, mask=at < segments, other=0)
    count = (stop - begin) * n_seed
    return gl.associative_scan(gl.where(count > FEW, gl.cdiv(count, TILE), 0), 0, _sum)


@gluon.jit
def find_long_rows(tree, tile, base, before, FEW: gl.constexpr):
    """`find_rows` where only segments of more than FEW folded rows have tiles.

    No number is too many. All segments are looked at, once each, since a block's items come in
    rising order: `before` tiles belong to those before `base`.

    Returns:
        What `find_rows` does, then `base` and `before` for the next item. The segment is
        `segments` behind the last tile.
    """
    offsets_ptr, _, _, segments, n_seed = tree
    sums = _long_tiles(offsets_ptr, segments, base, n_seed, FEW)
    tiles = gl.max(sums, 0)
    while (before + tiles <= tile) & (base < segments):
        before += tiles
        base += SCAN
        sums = _long_tiles(offsets_ptr, segments, base, n_seed, FEW)
        tiles = gl.max(sums, 0)
    passed = sums <= tile - before
    segment = gl.minimum(base + gl.sum(passed.to(gl.int32), 0), segments)
    begin = gl.load(offsets_ptr + segment)
    stop = gl.load(offsets_ptr + segment + 1, mask=segment < segments, other=0)
    first = (tile - before - gl.max(gl.where(passed, sums, 0), 0)) * TILE
    return segment, begin, first, (stop - begin) * n_seed, base, before


@gluon.jit
def key_span(extent_ptr, size, row, PACKED: gl.constexpr):
    """Row of the descriptor, first key there and number of keys, clamped to what exists."""
    if PACKED:
        owner = 0
        start = gl.minimum(gl.maximum(gl.load(extent_ptr + row).to(gl.int64), 0), size)
        stop = gl.minimum(gl.maximum(gl.load(extent_ptr + row + 1).to(gl.int64), 0), size)
        length = gl.maximum(stop - start, 0).to(gl.int32)
        start = start.to(gl.int32)
    else:
        owner = row
        start = 0
        length = size
        if extent_ptr is not None:
            given = gl.load(extent_ptr + row).to(gl.int64)
            length = gl.minimum(gl.maximum(given, 0), size).to(gl.int32)
    return owner, start, length


@gluon.jit
def find_own_rows(extent_ptr, live_ptr, size, owners, tile, PACKED: gl.constexpr):
    """Which own rows a tile has.

    Returns:
        Who owns them, the owner's first entry, the tile's first row and the number of keys, both
        counted from there. A dead owner has no keys; in a packed memory it may be one too many.
    """
    live = owners if live_ptr is None else gl.load(live_ptr)
    if PACKED:
        # Tiles are counted from the first entry that anyone owns.
        at = gl.load(extent_ptr) // TILE + tile
        owner = _last_at_most(extent_ptr, live, at, 1)
        first = (at - (gl.load(extent_ptr + owner) // TILE + owner)).to(gl.int32) * TILE
        start = first * 0
    else:
        each = gl.cdiv(size, TILE)
        owner = tile // each
        first = (tile - owner * each) * TILE
        start = owner * size
    length = first * 0
    if owner < live:
        _, key, length = key_span(extent_ptr, size, owner, PACKED)
        if PACKED:
            start = key
    return owner, start, first, length
