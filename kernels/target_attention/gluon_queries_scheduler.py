"""The scheduler of the Hopper gradient kernel of queries: one warp that finds work for a block."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.target_attention.gluon_boards import leave, next_item, tell
from ikbo_tree.kernels.target_attention.gluon_queries_device import (
    BLOCKS,
    HEAD,
    HIGH,
    ITEM,
    LAST,
    LOW,
    OWNER,
    ROW,
    ROWS,
    SPANS,
    START,
    STEPS,
    TILE,
)
from ikbo_tree.kernels.target_attention.gluon_rows import LANES, find_rows, key_span


@gluon.jit
def _spans(words, lane, maps, sizes, segment, row, PACKED: gl.constexpr, BN: gl.constexpr):
    """The words about keys."""
    extents, indices, _ = maps
    spans = 0
    steps = 0
    for i in gl.static_range(len(sizes)):
        owner_row = segment
        if indices[i] is not None:
            owner_row = gl.load(indices[i] + row)
        owner, start, length = key_span(extents[i], sizes[i], owner_row, (PACKED >> i) & 1)
        blocks = gl.cdiv(length, BN)
        low = gl.where(length < BN, 0, blocks * BN - length)
        words = gl.where(lane == BLOCKS + i, blocks, words)
        words = gl.where(lane == OWNER + i, owner, words)
        words = gl.where(lane == START + i, start, words)
        words = gl.where(lane == LAST + i, start + gl.maximum(length - BN, 0), words)
        words = gl.where(lane == LOW + spans, low, words)
        words = gl.where(lane == HIGH + spans, gl.minimum(length, BN), words)
        steps += blocks
        spans += gl.where(length > 0, 1, 0)
    words = gl.where(lane == SPANS, spans, words)
    return gl.where(lane == STEPS, steps, words)


@gluon.jit
def _hand_over(
    hands,
    n,
    item,
    tree,
    maps,
    sizes,
    H: gl.constexpr,
    BN: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
):
    """Tells of an item, head item % H of a tile; returns how many works there have been."""
    board, told, freed = hands
    _, _, _, segments, n_seed = tree
    _, indices, borders = maps
    lane = gl.arange(0, 32, LANES)
    segment, begin, first, end = find_rows(tree, item // H)
    end = gl.minimum(end, first + TILE)
    while first < end:
        row = begin + first // n_seed
        stop = end
        words = gl.where(lane == ROW, begin * n_seed + first, 0)
        if segment < segments:
            if RUNS:
                for i in gl.static_range(len(sizes)):
                    if indices[i] is not None:
                        border = gl.load(borders[i] + gl.load(indices[i] + row) + 1)
                        stop = gl.minimum(stop, (border - begin) * n_seed)
            words = _spans(words, lane, maps, sizes, segment, row, PACKED, BN)
        words = gl.where(lane == ROWS, stop - first, words)
        words = gl.where(lane == HEAD, item % H, words)
        words = gl.where(lane == ITEM, item, words)
        tell(board, told, freed, n, words)
        n += 1
        first = stop
    return n


@gluon.jit
def scheduler(
    board,
    told,
    freed,
    counter_ptr,
    again_ptr,
    tree,
    maps,
    sizes,
    n_items,
    H: gl.constexpr,
    BN: gl.constexpr,
    PACKED: gl.constexpr,
    RUNS: gl.constexpr,
    AGAIN: gl.constexpr,
):
    """Hands one work after another to the other roles.

    The first item is the block's own, the next ones are drawn from a counter. AGAIN: there are few
    or none, which `again_ptr` says, and 32 candidates are looked at in one go. Which block has
    which item makes no difference to any bits.

    Args are as in `query_gradients`; tree: (offsets, live, rows, segments, n_seed); maps: (extents,
    indices, borders) of each memory; PACKED: bit i for memory i; RUNS: a tile may have to be cut
    where an ancestor passes on to its next row.
    """
    hands = (board, told, freed)
    lane = gl.arange(0, 32, LANES)
    n = 0
    item = gl.program_id(0)
    if AGAIN:
        stride = gl.num_programs(0)
        while item < n_items:
            mine = item + lane * stride
            wanted = gl.load(again_ptr + mine, mask=mine < n_items, other=0) != 0
            turn = gl.min(gl.where(wanted, lane, 32), 0)
            while turn < 32:
                n = _hand_over(
                    hands, n, item + turn * stride, tree, maps, sizes, H, BN, PACKED, RUNS
                )
                turn = gl.min(gl.where(wanted & (lane > turn), lane, 32), 0)
            item += 32 * stride
    else:
        while item < n_items:
            n = _hand_over(hands, n, item, tree, maps, sizes, H, BN, PACKED, RUNS)
            item = next_item(counter_ptr)
        leave(counter_ptr)
    tell(board, told, freed, n, gl.zeros((32,), gl.int32, LANES))
