"""One softmax over keys that come block by block, as the forward kernels of attention keep it.

A softmax *state* is (maximum [M], sum [M], weighted sum of values [M, DVP]), all float32, the
maximum in units of log2, so that exp2 needs no multiplication: `scale2` is scale * log2(e).
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.target_attention.triton_device import (
    LN2,
    LOG2E,
    NOTHING,
    flat_rows,
    full_block,
    key_bias,
    load_rows,
    seen_keys,
    store_rows,
)


@triton.jit
def first_state(M: tl.constexpr, DVP: tl.constexpr):
    """The softmax over nothing."""
    peak = tl.full((M,), NOTHING, tl.float32)
    return peak, tl.zeros((M,), tl.float32), tl.zeros((M, DVP), tl.float32)


@triton.jit
def load_state(part_ptr, part_lse_ptr, at, valid, DV: tl.constexpr, DVP: tl.constexpr):
    """A finished result as a state: its log-sum-exp (in units of log2) as maximum, and sum 1."""
    peak = tl.load(part_lse_ptr + at, mask=valid, other=NOTHING)
    total = tl.where(peak == NOTHING, 0.0, 1.0)
    return peak, total, load_rows(part_ptr, DV, at, valid, DV, DVP)


@triton.jit
def merge_states(a, b):
    """The softmax over two sets of keys; twice nothing is nothing.

    Written so that every compiler rounds alike: no product here can be fused with another sum.
    """
    peak_a, total_a, acc_a = a
    peak_b, total_b, acc_b = b
    peak = tl.maximum(peak_a, peak_b)
    finite = tl.where(peak == NOTHING, 0.0, peak)
    weight_a = tl.exp2(peak_a - finite)
    weight_b = tl.exp2(peak_b - finite)
    total = tl.fma(total_b, weight_b, total_a * weight_a)
    spread_b = tl.broadcast_to(weight_b[:, None], acc_b.shape)
    return peak, total, tl.fma(acc_b, spread_b, acc_a * weight_a[:, None])


@triton.jit
def finish(state):
    """Output, and log-sum-exp as a natural logarithm; over nothing 0 and -inf."""
    peak, total, acc = state
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, NOTHING, (peak + tl.log2(total)) * LN2)
    return acc * (1.0 / total)[:, None], lse


@triton.jit
def store_result(
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    at,
    valid,
    state,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    LAST: tl.constexpr,
):
    """Writes what a state comes to, to o and lse, or for a later launch to the float32 `part`."""
    o, lse = finish(state)
    if LAST:
        store_rows(o_ptr, DV, at, valid, o, DV, DVP)
        tl.store(lse_ptr + at, lse, mask=valid)
    else:
        store_rows(part_ptr, DV, at, valid, o, DV, DVP)
        tl.store(part_lse_ptr + at, lse * LOG2E, mask=valid)


@triton.jit
def store_nothing(
    o_ptr,
    lse_ptr,
    begin,
    first,
    end,
    n_seed,
    heads,
    head,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
):
    """Zeros for dead rows, which lie last whatever the order."""
    steps = first + tl.arange(0, M)
    valid = steps < end
    at = flat_rows(None, begin, steps, valid, n_seed) * heads + head
    store_rows(o_ptr, DV, at, valid, tl.zeros((M, DVP), tl.float32), DV, DVP)
    tl.store(lse_ptr + at, tl.zeros((M,), tl.float32), mask=valid)


@triton.jit
def weigh(scores, v, state, scale2, bias, valid, PRECISION: tl.constexpr):
    """The values of one block of keys into a softmax state.

    Args:
        scores: [M, N], not scaled.
        v: [N, DVP].
        state: see the module.
        scale2: factor of the scores, not negative.
        bias: [N], or None.
        valid: which scores count, [1 or M, N], or None: all.
        PRECISION: of float32 products.
    """
    peak, total, acc = state
    if bias is None and valid is None:
        shift = tl.maximum(peak, tl.max(scores, 1) * scale2)
        peak_now = shift
        p = tl.exp2(scores * scale2 - shift[:, None])
    else:
        scores = scores * scale2
        if bias is not None:
            scores += bias[None, :]
        if valid is not None:
            scores = tl.where(valid, scores, NOTHING)
        peak_now = tl.maximum(peak, tl.max(scores, 1))
        # There may be no score at all.
        shift = tl.where(peak_now == NOTHING, 0.0, peak_now)
        p = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return peak_now, total, acc


@triton.jit
def attend(
    q,
    state,
    memory,
    k_desc,
    v_desc,
    k_ptr,
    v_ptr,
    start,
    head,
    kv_head,
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

    Blocks of which every score counts come first, without a mask and with loads in flight.

    q [M, DP]; k_desc, v_desc: see `forward_tile`; k_ptr, v_ptr, start: from `locate`; head,
    kv_head: of the queries and of the keys; scale2: see `step`; limit [M]: the last key that each
    query row attends to, or None: all of them; STAGES: blocks in flight.
    """
    full = high
    if limit is not None:
        full = tl.minimum(tl.min(limit) + 1, high)
        high = tl.minimum(tl.max(limit) + 1, high)
    full = low + tl.maximum(full - low, 0) // N * N
    for at in tl.range(low, full, N, num_stages=STAGES):
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
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        state = weigh(scores, v, state, scale2, bias, valid, PRECISION)
    for at in tl.range(full, high, N, num_stages=1):
        steps = at + tl.arange(0, N)
        seen = seen_keys(memory, start, steps, steps < high)
        bias = key_bias(memory, start, head, steps, seen)
        k = load_rows(k_ptr, memory[5], steps, seen, D, DP)
        v = load_rows(v_ptr, memory[8], steps, seen, DV, DVP)
        valid = seen[None, :]
        if limit is not None:
            valid = valid & (steps[None, :] <= limit[:, None])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        state = weigh(scores, v, state, scale2, bias, valid, PRECISION)
    return state
