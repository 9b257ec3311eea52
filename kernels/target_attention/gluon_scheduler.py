"""The scheduler of the Hopper attention kernel: one warp that finds work for a block."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.target_attention.gluon_boards import leave, tell
from ikbo_tree.kernels.target_attention.gluon_device import (
    BLOCKS,
    DIAGONAL,
    HEAD,
    HIGH,
    LAST,
    LOW,
    OWNER,
    ROW,
    ROWS,
    SPACE,
    SPANS,
    START,
    TILE,
    WHOLE,
)
from ikbo_tree.kernels.target_attention.gluon_rows import (
    LANES,
    find_long_rows,
    find_own_rows,
    find_rows,
    key_span,
)


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
def _add_span(words, lane, spans, owner, start, length, i: gl.constexpr, BN: gl.constexpr):
    """The words about the keys of memory number i, the next of the `spans` that have any.

    Returns:
        The words, and where the memory's last block begins, counted from its first key.
    """
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
    return words, begin


@gluon.jit
def _add_counts(words, lane, spans, whole):
    words = gl.where(lane == SPANS, spans, words)
    return gl.where(lane == WHOLE, whole, words)


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
        owner, start, length = key_span(extents[i], sizes[i], owner_row, (PACKED >> i) & 1)
        words, _ = _add_span(words, lane, spans, owner, start, length, i, BN)
        whole += gl.maximum(gl.cdiv(length, BN) - 1, 0)
        spans += gl.where(length > 0, 1, 0)
    return _add_counts(words, lane, spans, whole), spans


@gluon.jit
def _own_spans(
    words,
    lane,
    owner,
    start,
    first,
    length,
    CAUSAL: gl.constexpr,
    BN: gl.constexpr,
):
    """Likewise of own rows from `first` on, whose keys begin at `start`."""
    if CAUSAL:
        # Up to the end of the block of keys where the rows begin; then one block after another.
        spans = 0
        whole = 0
        low = first * 0
        for i in gl.static_range(TILE // BN):
            high = gl.minimum(first + (i + 1) * BN, length)
            mine = gl.maximum(high - low, 0)
            words, begin = _add_span(words, lane, spans, owner, start + low, mine, i, BN)
            words = gl.where(lane == DIAGONAL + i, first - low - begin, words)
            whole += gl.maximum(gl.cdiv(mine, BN) - 1, 0)
            spans += gl.where(mine > 0, 1, 0)
            low = high + 0
    else:
        words, _ = _add_span(words, lane, 0, owner, start, length, 0, BN)
        spans = 1
        whole = gl.cdiv(length, BN) - 1
    return _add_counts(words, lane, spans, whole)


@gluon.jit
def _next_item(counter_ptr, item, DYNAMIC: gl.constexpr):
    if DYNAMIC:
        item = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return item + gl.num_programs(0)


@gluon.jit
def _tell_rows(
    hands,
    lane,
    n,
    found,
    head,
    results,
    tree,
    maps,
    sizes,
    H: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    BN: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Hands over a tile of target rows, one head; returns how many works there have been."""
    _, o_ptr, lse_ptr = results
    _, _, _, segments, n_seed = tree
    _, indices, borders = maps
    segment, begin, first, end = found
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
        if CAUSAL:
            words = gl.where(lane == DIAGONAL, BN, words)
        words, spans = _spans(words, lane, maps, sizes, segment, row, PACKED, BN)
        if spans > 0:
            tell(hands[0], hands[1], hands[2], n, words)
            n += 1
        else:
            _store_nothing(o_ptr, lse_ptr, at + first, stop - first, head, float("-inf"), H, D, DP)
        first = stop
    return n


@gluon.jit
def _tell_own_rows(
    hands,
    lane,
    n,
    tile,
    head,
    results,
    own_tree,
    extent_ptr,
    size,
    H: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    BN: gl.constexpr,
    PACKED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Likewise a tile of own rows; writes zeros to rows of a padded memory that are no key's."""
    _, o_ptr, lse_ptr = results
    live_ptr, owners, _ = own_tree
    owner, start, first, length = find_own_rows(extent_ptr, live_ptr, size, owners, tile, PACKED)
    end = gl.minimum(length, first + TILE)
    if not PACKED:
        blank = gl.maximum(end, first)
        blanks = gl.minimum(first + TILE, size) - blank
        _store_nothing(o_ptr, lse_ptr, start + blank, blanks, head, 0.0, H, D, DP)
    if first < end:
        words = gl.where(lane == ROW, start + first, 0)
        words = gl.where(lane == ROWS, end - first, words)
        words = gl.where(lane == HEAD, head, words)
        words = gl.where(lane == SPACE, 1, words)
        if PACKED:
            words = _own_spans(words, lane, 0, start, first, length, CAUSAL, BN)
        else:
            words = _own_spans(words, lane, owner, 0, first, length, CAUSAL, BN)
        tell(hands[0], hands[1], hands[2], n, words)
        n += 1
    return n


@gluon.jit
def scheduler(
    board,
    told,
    q_empty,
    results,
    counter_ptr,
    tree,
    own_tree,
    maps,
    sizes,
    n_items,
    H: gl.constexpr,
    D: gl.constexpr,
    DP: gl.constexpr,
    BN: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    FEW: gl.constexpr,
    CAUSAL: gl.constexpr,
    DYNAMIC: gl.constexpr,
):
    """Hands one work after another to the other roles; writes what attends to nothing itself.

    Item w is head w % H of tile w // H. The first one is the block's own, the next ones are drawn
    from a counter, so that empty tiles and unequal lengths leave no block idle early. Which block
    has which tile makes no difference to any bits. Own rows come behind all others, the last ones
    first, as they may have the most keys.

    Args are as in `run_roles`; results: (o_desc, o_ptr, lse_ptr) of each space; maps: (extents,
    indices, borders) of each memory.
    """
    hands = (board, told, q_empty)
    lane = gl.arange(0, 32, LANES)
    n = 0
    item = gl.program_id(0)
    base = 0
    before = 0
    while item < n_items:
        head = item % H
        tile = item // H
        if len(results) > 1 and tile >= own_tree[2]:
            n = _tell_own_rows(
                hands,
                lane,
                n,
                n_items // H - 1 - tile,
                head,
                results[1],
                own_tree,
                maps[0][0],
                sizes[0],
                H,
                D,
                DP,
                BN,
                PACKED,
                CAUSAL,
            )
        else:
            if FEW > 0:
                segment, begin, first, end, base, before = find_long_rows(
                    tree, tile, base, before, FEW
                )
                found = (segment, begin, first, end)
            else:
                found = find_rows(tree, tile)
            n = _tell_rows(
                hands,
                lane,
                n,
                found,
                head,
                results[0],
                tree,
                maps,
                sizes,
                H,
                D,
                DP,
                BN,
                PACKED,
                RUNS,
                CAUSAL,
            )
        item = _next_item(counter_ptr, item, DYNAMIC)
        if FEW > 0:
            # The last long segment is far from where the host had to end.
            item = gl.where(base < tree[3], item, n_items)
    tell(hands[0], hands[1], hands[2], n, gl.zeros((32,), gl.int32, LANES))
    if DYNAMIC:
        leave(counter_ptr)
