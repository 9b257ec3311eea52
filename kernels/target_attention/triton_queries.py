"""The gradient of attention's queries, and what softmax subtracts from each dP.

With P the weights and dP = dO V^T, the gradient of the scores is

    dS = P * (dP - delta),    delta = sum over keys of P * dP, less the gradient of the log-sum-exp

`sum(dO * O)` is that sum too, but of an output that was rounded to 16 bits: where one key has
nearly all weight, dS nearly vanishes and the rounding of O shows. So it is only the start: the sum
of the dS that it gives tells how far off it is. Where that matters to a row, its tile is walked a
second time, with the right one. Gradients of keys take the right one in any case.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.target_attention.triton_device import (
    COUNTS,
    LOG2E,
    MAPS,
    NOTHING,
    find_rows,
    flat_offsets,
    flat_rows,
    full_block,
    key_bias,
    load_rows,
    locate,
    seen_keys,
    store_rows,
)
from ikbo_tree.kernels.target_attention.triton_keys import own_rows

_HALF_UNIT = tl.constexpr(2.0**-11)
_BFLOAT_UNIT = tl.constexpr(2.0**-8)


@triton.jit
def _block(
    sums,
    q,
    do,
    k,
    v,
    lse2,
    delta,
    scale2,
    bias,
    valid,
    DQ: tl.constexpr,
    SQUARES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds a block of keys to (dQ / scale, sum of dS, of its squares, of the squares of P)."""
    dq, miss, ds_squares, p_squares = sums
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
    if bias is not None:
        scores += bias[None, :]
    p = tl.exp2(scores - lse2[:, None])
    if valid is not None:
        p = tl.where(valid, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    miss += tl.sum(ds, 1)
    if SQUARES:
        ds_squares += tl.sum(ds * ds, 1)
        p_squares += tl.sum(p * p, 1)
    if DQ:
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, miss, ds_squares, p_squares


@triton.jit
def _walk(
    sums,
    q,
    do,
    lse2,
    delta,
    memory,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    start,
    length,
    head,
    scale2,
    limit,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    N: tl.constexpr,
    DQ: tl.constexpr,
    SQUARES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`_block` for all keys of one row of a memory; see `attend`."""
    full = length
    if limit is not None:
        full = tl.minimum(tl.min(limit) + 1, length)
        length = tl.minimum(tl.max(limit) + 1, length)
    full = full // N * N
    kv_head = head // memory[12]
    for at in tl.range(0, full, N, num_stages=STAGES):
        steps = at + tl.arange(0, N)
        bias = key_bias(memory, start, head, steps, None)
        if memory[3] is None:
            valid = None
            k = full_block(memory, k_desc, k_ptr, start, at, kv_head, 5, 6, D, DP, N)
            v = full_block(memory, v_desc, v_ptr, start, at, kv_head, 8, 9, DV, DVP, N)
        else:
            seen = seen_keys(memory, start, steps, None)
            valid = seen[None, :]
            k = load_rows(k_ptr, memory[5], steps, seen, D, DP)
            v = load_rows(v_ptr, memory[8], steps, seen, DV, DVP)
        sums = _block(sums, q, do, k, v, lse2, delta, scale2, bias, valid, DQ, SQUARES, PRECISION)
    for at in tl.range(full, length, N, num_stages=1):
        steps = at + tl.arange(0, N)
        seen = seen_keys(memory, start, steps, steps < length)
        bias = key_bias(memory, start, head, steps, seen)
        k = load_rows(k_ptr, memory[5], steps, seen, D, DP)
        v = load_rows(v_ptr, memory[8], steps, seen, DV, DVP)
        valid = seen[None, :]
        if limit is not None:
            valid = valid & (steps[None, :] <= limit[:, None])
        sums = _block(sums, q, do, k, v, lse2, delta, scale2, bias, valid, DQ, SQUARES, PRECISION)
    return sums


@triton.jit
def start_delta(do, o_ptr, dlse_ptr, at, valid, DV: tl.constexpr, DVP: tl.constexpr):
    """sum(dO * O) less the gradient of the log-sum-exp, and that gradient (0 without)."""
    o = load_rows(o_ptr, DV, at, valid, DV, DVP)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    dlse = tl.zeros_like(delta)
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + at, mask=valid, other=0.0).to(tl.float32)
    return delta - dlse, dlse


@triton.jit
def too_far(miss, ds_squares, p_squares, valid, DTYPE: tl.constexpr):
    """Which rows' dQ would show that delta is off by `miss`.

    dQ changes by miss * (P K). Next to what rounding dS to 16 bits does anyway, u * norm(dS) * K,
    that is nothing where P K averages over many keys, or where miss is small itself.
    """
    unit: tl.constexpr = _HALF_UNIT if tl.float16 == DTYPE else _BFLOAT_UNIT
    noise = unit * tl.sqrt(ds_squares)
    miss = tl.abs(miss)
    return valid & ((miss * tl.sqrt(p_squares) > 0.5 * noise) | (miss > 2.0 * noise))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def query_gradients(
    q_ptr,
    do_ptr,
    o_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    miss_ptr,
    dq_ptr,
    part_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memories,
    extent0,
    index0,
    border0,
    extent1,
    index1,
    border1,
    extent2,
    index2,
    border2,
    extent3,
    index3,
    border3,
    k_desc0,
    v_desc0,
    k_desc1,
    v_desc1,
    k_desc2,
    v_desc2,
    k_desc3,
    v_desc3,
    size0,
    size1,
    size2,
    size3,
    q_row,
    q_seed,
    q_head,
    do_row,
    do_seed,
    do_head,
    rows,
    segments,
    n_seed,
    heads,
    stats_pitch,
    scale,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DQ: tl.constexpr,
    KNOWN: tl.constexpr,
    EXACT: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    RUNS: tl.constexpr,
    OWN: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of query rows and one head, over the keys of up to four memories.

    Laid out as in `forward_tile`, with do_ptr like o, dq_ptr contiguous like q and part_ptr, dq in
    float32, for what one launch leaves for the next. delta_ptr and lse2_ptr, the log-sum-exp in
    units of log2 with inf for -inf, have a row of `stats_pitch` for each head.

    DQ: dq is wanted; otherwise delta alone. KNOWN: delta_ptr has the right delta; otherwise it is
    written. EXACT: delta is corrected as this module describes; with several launches, those
    without DQ do that first, and leave the sum of dS in miss_ptr. OWN, CAUSAL: see `forward_tile`.
    """
    extents = (extent0, extent1, extent2, extent3)
    indices = (index0, index1, index2, index3)
    borders = (border0, border1, border2, border3)
    sizes = (size0, size1, size2, size3)
    k_descs = (k_desc0, k_desc1, k_desc2, k_desc3)
    v_descs = (v_desc0, v_desc1, v_desc2, v_desc3)
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    if OWN:
        segment, begin, first, end = own_rows(
            memories[0], extent0, size0, live_ptr, segments, tile, M
        )
    else:
        segment, begin, first, end = find_rows(
            offsets_ptr, live_ptr, segments, rows, tile, n_seed, M
        )
    end = tl.minimum(end, first + M)
    if segment == segments:
        if DQ and LAST:
            steps = first + tl.arange(0, M)
            valid = steps < end
            at = flat_rows(None, begin, steps, valid, n_seed) * heads + head
            store_rows(dq_ptr, D, at, valid, tl.zeros((M, DP), tl.float32), D, DP)
        first = end
    while first < end:
        row = begin + first // n_seed
        stop = end
        if RUNS:
            for i in tl.static_range(COUNT):
                if indices[i] is not None:
                    border = tl.load(borders[i] + tl.load(indices[i] + row) + 1)
                    left = (border - begin).to(tl.int64) * n_seed
                    stop = tl.minimum(stop.to(tl.int64), left).to(tl.int32)
        steps = first + tl.arange(0, M)
        valid = steps < stop
        limit = tl.where(valid, steps, first) if CAUSAL else None
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        at = flat * heads + head
        column = head.to(tl.int64) * stats_pitch + flat
        q_at = flat_offsets(flat, n_seed, q_row, q_seed, False)
        q = load_rows(q_ptr + head.to(tl.int64) * q_head, 1, q_at, valid, D, DP)
        do_at = flat_offsets(flat, n_seed, do_row, do_seed, False)
        do = load_rows(do_ptr + head.to(tl.int64) * do_head, 1, do_at, valid, DV, DVP)
        lse = tl.load(lse_ptr + at, mask=valid, other=NOTHING)
        lse2 = tl.where(lse == NOTHING, float("inf"), lse * LOG2E)
        before = tl.zeros((M,), tl.float32)
        dlse = tl.zeros((M,), tl.float32)
        if FIRST and not KNOWN:
            delta, dlse = start_delta(do, o_ptr, dlse_ptr, at, valid, DV, DVP)
        else:
            delta = tl.load(delta_ptr + column, mask=valid, other=0.0)
            if not KNOWN:
                before = tl.load(miss_ptr + at, mask=valid, other=0.0)
                if LAST and dlse_ptr is not None:
                    dlse = tl.load(dlse_ptr + at, mask=valid, other=0.0).to(tl.float32)
        right = delta
        walks = 1 if DQ or EXACT else 0
        walk = 0
        while walk < walks:
            dq = tl.zeros((M, DP), tl.float32)
            if DQ and not FIRST:
                dq = load_rows(part_ptr, D, at, valid, D, DP)
            zeros = tl.zeros((M,), tl.float32)
            sums = (dq, before, zeros, zeros)
            for i in tl.static_range(COUNT):
                owner = segment
                if indices[i] is not None:
                    owner = tl.load(indices[i] + row)
                k_ptr, v_ptr, length, start = locate(
                    memories[i], extents[i], sizes[i], owner, head // memories[i][12]
                )
                sums = _walk(
                    sums,
                    q,
                    do,
                    lse2,
                    delta,
                    memories[i],
                    k_descs[i],
                    v_descs[i],
                    k_ptr,
                    v_ptr,
                    start,
                    length,
                    head,
                    scale * LOG2E,
                    limit,
                    D,
                    DV,
                    DP,
                    DVP,
                    N,
                    DQ,
                    DQ and EXACT and not KNOWN,
                    PRECISION,
                    STAGES,
                )
            dq, miss, ds_squares, p_squares = sums
            walk += 1
            if EXACT and not KNOWN and walk == 1:
                if LAST:
                    right = delta + (miss - dlse)
                else:
                    tl.store(miss_ptr + at, miss, mask=valid)
                if DQ:
                    far = too_far(miss - dlse, ds_squares, p_squares, valid, q.dtype)
                    delta = tl.where(far, right, delta)
                    walks += tl.max(far.to(tl.int32))
            if DQ and walk == walks:
                if LAST:
                    store_rows(dq_ptr, D, at, valid, dq * scale, D, DP)
                else:
                    store_rows(part_ptr, D, at, valid, dq, D, DP)
        if not KNOWN:
            tl.store(delta_ptr + column, right, mask=valid)
            tl.store(lse2_ptr + column, lse2, mask=valid)
        first = stop
