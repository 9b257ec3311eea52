"""The scheduler of the Hopper attention kernel: one warp that finds work for a block."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.target_attention.gluon_device import (
    BLOCKS,
    HEAD,
    HIGH,
    LAST,
    LOW,
    OWNER,
    ROW,
    ROWS,
    SPANS,
    START,
    TILE,
    WHOLE,
    WORDS,
    block_barrier,
    viewed,
)

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


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
def _find_rows(tree, tile):
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
def _store_nothing(o_ptr, lse_ptr, row, rows, head, lse, H, D: gl.constexpr, DP: gl.constexpr):
    """Zeros to rows of the result, and `lse` to their log-sum-exp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [1, 1], [1, 0])
    columns = gl.arange(0, DP, gl.SliceLayout(0, layout))
    step: gl.constexpr = 256 // DP
    nothing = gl.zeros((step, DP), o_ptr.dtype.element_ty, layout)
    base = (row.to(gl.int64) * H + head) * D
    for first in range(0, rows, step):
        at = first + gl.arange(0, step, gl.SliceLayout(1, layout))
        ptrs = o_ptr + base + (at * (H * D))[:, None] + columns[None, :]
        gl.store(ptrs, nothing, mask=(at < rows)[:, None] & (columns < D)[None, :])
    for first in range(0, rows, 32):
        at = first + gl.arange(0, 32, LANES)
        value = gl.zeros((32,), gl.float32, LANES) + lse
        gl.store(lse_ptr + row.to(gl.int64) * H + head + at * H, value, mask=at < rows)


@gluon.jit
def _key_span(extent_ptr, size, row, PACKED: gl.constexpr):
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
def _spans(words, lane, maps, sizes, segment, row, PACKED: gl.constexpr, BN: gl.constexpr):
    """The words about keys, and how many memories have any."""
    extents, indices, _ = maps
    spans = 0
    whole = 0
    for i in gl.static_range(len(sizes)):
        owner_row = segment
        if indices[i] is not None:
            owner_row = gl.load(indices[i] + row)
        owner, start, length = _key_span(extents[i], sizes[i], owner_row, (PACKED >> i) & 1)
        blocks = gl.cdiv(length, BN)
        # A short last block begins so early that it is full, where there are keys enough.
        begin = gl.maximum(length - BN, 0)
        low = gl.where(length < BN, 0, blocks * BN - length)
        words = gl.where(lane == BLOCKS + i, blocks, words)
        words = gl.where(lane == OWNER + i, owner, words)
        words = gl.where(lane == START + i, start, words)
        words = gl.where(lane == LAST + i, start + begin, words)
        words = gl.where(lane == LOW + spans, gl.where(length > 0, low, 0), words)
        words = gl.where(lane == HIGH + spans, gl.minimum(length, BN), words)
        whole += gl.maximum(blocks - 1, 0)
        spans += gl.where(length > 0, 1, 0)
    words = gl.where(lane == SPANS, spans, words)
    return gl.where(lane == WHOLE, whole, words), spans


@gluon.jit
def _tell(board, told, q_empty, n, words):
    """Writes the words of work number n, which readers of number n - 2 have left."""
    b = n % 2
    mbarrier.wait(q_empty.index(b), ((n // 2) & 1) ^ 1)
    viewed(board, gl.int32, [2, WORDS], FLAT).index(b).store(words)
    block_barrier()
    mbarrier.arrive(told.index(b))


@gluon.jit
def _next_item(counter_ptr, item, DYNAMIC: gl.constexpr):
    if DYNAMIC:
        item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return item + gl.num_programs(0)


@gluon.jit
def _leave(counter_ptr):
    """The last block to come here leaves the counters as the next launch wants them."""
    left = gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel")
    if left == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
        gl.atomic_xchg(counter_ptr + 1, 0, sem="relaxed")


@gluon.jit
def scheduler(
    board,
    told,
    q_empty,
    o_ptr,
    lse_ptr,
    counter_ptr,
    tree,
    maps,
    sizes,
    n_items,
    H: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    BN: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    DYNAMIC: gl.constexpr,
):
    """Hands one work after another to the other roles; writes what attends to nothing itself.

    Item w is head w % H of tile w // H. The first one is the block's own, the next ones are drawn
    from a counter, so that empty tiles and unequal lengths leave no block idle early. Which block
    has which tile makes no difference to any bits.

    Args are as in `attention_forward`; tree: (offsets, live, rows, segments, n_seed); maps:
    (extents, indices, borders) of each memory; PACKED: bit i for memory i; RUNS: a tile may have to
    be cut where an ancestor passes on to its next row.
    """
    _, _, _, segments, n_seed = tree
    _, indices, borders = maps
    lane = gl.arange(0, 32, LANES)
    n = 0
    item = gl.program_id(0)
    while item < n_items:
        head = item % H
        segment, begin, first, end = _find_rows(tree, item // H)
        end = gl.minimum(end, first + TILE)
        at = begin * n_seed
        if segment == segments:
            _store_nothing(o_ptr, lse_ptr, at + first, end - first, head, 0.0, H, D, DP)
            first = end
        while first < end:
            row = begin + first // n_seed
            stop = end
            if RUNS:
                for i in gl.static_range(len(sizes)):
                    if indices[i] is not None:
                        border = gl.load(borders[i] + gl.load(indices[i] + row) + 1)
                        stop = gl.minimum(stop, (border - begin) * n_seed)
            words = gl.where(lane == ROW, at + first, 0)
            words = gl.where(lane == ROWS, stop - first, words)
            words = gl.where(lane == HEAD, head, words)
            words, spans = _spans(words, lane, maps, sizes, segment, row, PACKED, BN)
            if spans > 0:
                _tell(board, told, q_empty, n, words)
                n += 1
            else:
                _store_nothing(
                    o_ptr, lse_ptr, at + first, stop - first, head, float("-inf"), H, D, DP
                )
            first = stop
        item = _next_item(counter_ptr, item, DYNAMIC)
    _tell(board, told, q_empty, n, gl.zeros((32,), gl.int32, LANES))
    if DYNAMIC:
        _leave(counter_ptr)
