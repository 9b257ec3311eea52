"""The forward kernels of attention: a tile of query rows against everything its ancestors own.

`forward_rows`: one softmax state walks over the keys of all memories, in the caller's order.
`forward_chunks`, for few query rows a segment: keys are cut into chunks of a fixed length, counted
from the first key of their row; each chunk has a state of its own, and states are merged in order.
One program may take all chunks of a tile, or several may share them and `combine` merges: the same
additions in the same order, so the same bits, and how many programs there are may depend on the
batch. Whether a segment is cut depends on how many query rows it has itself, and nothing else.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows
from ikbo_tree.kernels.common.triton_tiles import find_tile
from ikbo_tree.kernels.target_attention.triton_device import (
    LN2,
    LOG2E,
    NOTHING,
    finish,
    first_state,
    flat_offsets,
    flat_rows,
    load_rows,
    locate,
    merge_states,
    store_rows,
)


@triton.jit
def find_rows(offsets_ptr, live_ptr, segments, rows, tile, n_seed, T: tl.constexpr):
    """The query rows of a tile.

    Where `offsets_ptr` is None every row is a segment, and the tiles of one follow each other.

    Returns:
        The segment (`segments` for dead rows), the segment's first position, the tile's first
        folded row and the segment's end counted from there: nothing where first >= end.
    """
    if offsets_ptr is None:
        each = tl.cdiv(n_seed, T)
        segment = tile // each
        first = (tile - segment * each) * T
        begin = segment
        end = n_seed
        segment = tl.where(segment < live_rows(live_ptr, rows), segment, segments)
        end = tl.where(begin < rows, end, 0)
    else:
        segment, at, stop = find_tile(offsets_ptr, segments, rows, tile, n_seed, T)
        begin = tl.load(offsets_ptr + segment)
        base = begin.to(tl.int64) * n_seed
        first = (at - base).to(tl.int32)
        end = (stop - base).to(tl.int32)
    return segment, begin, first, end


@triton.jit
def step(q, k, v, state, scale2, bias, valid, PRECISION: tl.constexpr):
    """One block of keys into a softmax state.

    Args:
        q: [M, D].
        k: [N, D].
        v: [N, W].
        state: maximum [M], sum [M], weighted sum of values [M, W].
        scale2: factor of the scores, not negative.
        bias: [N] in units of log2, or None.
        valid: which scores count, [1 or M, N], or None: all.
    """
    peak, total, acc = state
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if bias is None and valid is None:
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale2)
        # Not -inf: there is at least one score.
        shift = new_peak
        p = tl.exp2(scores * scale2 - shift[:, None])
    else:
        scores = scores * scale2
        if bias is not None:
            scores += bias[None, :]
        if valid is not None:
            scores = tl.where(valid, scores, NOTHING)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == NOTHING, 0.0, new_peak)
        p = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def attend(
    q,
    state,
    memory,
    k_ptr,
    v_ptr,
    start,
    head,
    low,
    high,
    scale2,
    limit,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The keys `low ... high - 1` of one row of a memory into a softmax state.

    Args:
        q: [M, DP].
        state: see `step`.
        memory: see triton_device.
        k_ptr, v_ptr, start: from `locate`.
        head: of the queries.
        low: first key.
        high: end of the keys.
        scale2: see `step`.
        limit: [M], the last key that each query row attends to, or None: all of them.
        D, DV, DP, DVP: widths of keys and values, and powers of two that hold them.
        N: keys a block.
        PRECISION: of float32 products.
        STAGES: blocks in flight.
    """
    whole = low + (high - low) // N * N
    if limit is not None:
        whole = low + tl.maximum(tl.minimum(tl.min(limit) + 1, high) - low, 0) // N * N
    if memory[2] is not None:
        bias_at = memory[2] + start * memory[13] + head * memory[14]
    peak, total, acc = state
    for at in tl.range(low, whole, N, num_stages=STAGES):
        steps = at + tl.arange(0, N)
        bias = None
        valid = None
        if memory[2] is not None:
            bias = tl.load(bias_at + steps.to(tl.int64) * memory[13]).to(tl.float32) * LOG2E
        if memory[3] is None:
            k = load_rows(k_ptr, memory[8], steps, None, D, DP)
            v = load_rows(v_ptr, memory[11], steps, None, DV, DVP)
            peak, total, acc = step(
                q, k, v, (peak, total, acc), scale2, bias, None, PRECISION
            )
        else:
            seen = tl.load(memory[3] + start + steps) != 0
            k = load_rows(k_ptr, memory[8], steps, seen, D, DP)
            v = load_rows(v_ptr, memory[11], steps, seen, DV, DVP)
            peak, total, acc = step(
                q, k, v, (peak, total, acc), scale2, bias, seen[None, :], PRECISION
            )
    for at in tl.range(whole, high, N, num_stages=1):
        steps = at + tl.arange(0, N)
        seen = steps < high
        if memory[3] is not None:
            seen = tl.load(memory[3] + start + steps, mask=seen, other=0) != 0
        bias = None
        if memory[2] is not None:
            bias = tl.load(bias_at + steps.to(tl.int64) * memory[13], mask=seen, other=0.0)
            bias = bias.to(tl.float32) * LOG2E
        k = load_rows(k_ptr, memory[8], steps, seen, D, DP)
        v = load_rows(v_ptr, memory[11], steps, seen, DV, DVP)
        valid = seen[None, :]
        if limit is not None:
            valid = valid & (steps[None, :] <= limit[:, None])
        peak, total, acc = step(q, k, v, (peak, total, acc), scale2, bias, valid, PRECISION)
    return peak, total, acc


@triton.jit(do_not_specialize=["size0", "size1", "size2", "size3", "rows", "segments", "n_seed"])
def forward_rows(
    q_ptr,
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memories,
    size0,
    size1,
    size2,
    size3,
    q_row,
    q_seed,
    q_head,
    rows,
    segments,
    n_seed,
    heads,
    groups,
    scale,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    RUNS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of query rows and one head, over the keys of up to four memories.

    Args:
        q_ptr: [rows, n_seed, heads, D].
        o_ptr: [rows, n_seed, heads, DV], contiguous.
        lse_ptr: [rows, n_seed, heads], likewise.
        part_ptr: float32, like o: what an earlier launch leaves for a later one.
        part_lse_ptr: likewise, in units of log2.
        order_ptr: rows by position, or None.
        offsets_ptr: [segments + 1] first position of each segment; None: each row is one.
        live_ptr: [1] live rows, or None.
        memories: COUNT tuples, see triton_device.
        size0, size1, size2, size3: beside them.
        q_row, q_seed, q_head: strides.
        rows, segments, n_seed, heads, groups: sizes; `groups` heads share one of the keys'.
        scale: of the scores.
        FIRST: nothing to continue from. Otherwise the state comes from `part`.
        LAST: writes o and lse. Otherwise `part`.
        RUNS: memories have routes of their own, so a tile may have to be cut where one of them
            passes to its next row.
    """
    sizes = (size0, size1, size2, size3)
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    segment, begin, first, end = find_rows(
        offsets_ptr, live_ptr, segments, rows, tile, n_seed, M
    )
    end = tl.minimum(end, first + M)
    if segment == segments:
        if LAST:
            _write_nothing(o_ptr, lse_ptr, begin, first, end, n_seed, heads, head, DV, DVP, M)
        first = end
    while first < end:
        stop = end
        if RUNS:
            row = begin + first // n_seed
            for i in tl.static_range(COUNT):
                if memories[i][5] is not None:
                    owner = tl.load(memories[i][5] + row)
                    border = tl.load(memories[i][6] + owner + 1)
                    stop = tl.minimum(stop, ((border - begin) * n_seed).to(tl.int32))
        steps = first + tl.arange(0, M)
        valid = steps < stop
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        q_at = flat_offsets(flat, n_seed, q_row, q_seed, False)
        q = load_rows(q_ptr + head.to(tl.int64) * q_head, 1, q_at, valid, D, DP)
        if NEGATIVE:
            q = -q
        state = first_state(M, DVP)
        if not FIRST:
            state = _load_state(part_ptr, part_lse_ptr, flat * heads + head, valid, DV, DVP)
        for i in tl.static_range(COUNT):
            owner = segment
            if memories[i][5] is not None:
                owner = tl.load(memories[i][5] + begin + first // n_seed)
            k_ptr, v_ptr, length, start = locate(memories[i], sizes[i], owner, head // groups)
            state = attend(
                q,
                state,
                memories[i],
                k_ptr,
                v_ptr,
                start,
                head,
                0,
                length,
                tl.abs(scale) * LOG2E,
                None,
                D,
                DV,
                DP,
                DVP,
                N,
                PRECISION,
                STAGES,
            )
        peak, total, acc = state
        _write(
            o_ptr, lse_ptr, part_ptr, part_lse_ptr, flat * heads + head, valid, peak, total, acc,
            DV, DVP, LAST,
        )
        first = stop


@triton.jit
def _load_state(part_ptr, part_lse_ptr, at, valid, DV: tl.constexpr, DVP: tl.constexpr):
    """A finished result as a state: its log-sum-exp is the maximum, and the sum 1."""
    peak = tl.load(part_lse_ptr + at, mask=valid, other=NOTHING)
    total = tl.where(peak == NOTHING, 0.0, 1.0)
    return peak, total, load_rows(part_ptr, DV, at, valid, DV, DVP)


@triton.jit
def _write(
    o_ptr, lse_ptr, part_ptr, part_lse_ptr, at, valid, peak, total, acc,
    DV: tl.constexpr, DVP: tl.constexpr, LAST: tl.constexpr,
):
    o, lse = finish(peak, total, acc)
    if LAST:
        store_rows(o_ptr, DV, at, valid, o, DV, DVP)
        tl.store(lse_ptr + at, lse, mask=valid)
    else:
        store_rows(part_ptr, DV, at, valid, o, DV, DVP)
        tl.store(part_lse_ptr + at, lse * LOG2E, mask=valid)


@triton.jit
def _write_nothing(
    o_ptr, lse_ptr, begin, first, end, n_seed, heads, head,
    DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
):
    """Zeros for dead rows, which lie last whatever the order."""
    steps = first + tl.arange(0, M)
    valid = steps < end
    at = flat_rows(None, begin, steps, valid, n_seed) * heads + head
    store_rows(o_ptr, DV, at, valid, tl.zeros((M, DVP), tl.float32), DV, DVP)
    tl.store(lse_ptr + at, tl.zeros((M,), tl.float32), mask=valid)
