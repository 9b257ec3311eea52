"""Kernels of `silu_attention`: tiles of query rows against keys, and of keys against query rows.

Sums over keys begin at a row's first key and sums over query rows at the segment's first, in blocks
counted from there: no bits depend on other requests (contract 4), and no order on time.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.target_attention.triton_device import (
    COUNTS,
    MAPS,
    find_rows,
    flat_offsets,
    flat_rows,
    load_rows,
    locate,
    seen_keys,
    store_rows,
)
from ikbo_tree.kernels.target_attention.triton_keys import find_keys, find_queries


@triton.jit
def _bias(memory, start, head, keys, seen):
    """[keys] float32 bias of keys that one row owns; None without."""
    bias = None
    if memory[2] is not None:
        at = (start + keys) * memory[10] + head * memory[11]
        bias = tl.load(memory[2] + at, mask=seen, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _slope(scores, gates):
    """The derivative of silu."""
    return gates * (1.0 + scores * (1.0 - gates))


@triton.jit
def _product(weights, x, sums, PRECISION: tl.constexpr):
    """`sums` + weights [M, N] float32 times x [N, W].

    Beside 16-bit x weights are two 16-bit pieces: rounded to one, they would cost a rounding more
    than the budget has, which shows where a row has few keys.
    """
    high = weights.to(x.dtype)
    sums = tl.dot(high, x, sums, input_precision=PRECISION)
    if x.dtype != tl.float32:
        low = (weights - high.to(tl.float32)).to(x.dtype)
        sums = tl.dot(low, x, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _rows(ptr, flat, valid, n_seed, strides, head, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[M, PADDED] folded rows of one head of a tensor [rows, n_seed, heads, WIDTH]."""
    at = flat_offsets(flat, n_seed, strides[0], strides[1], False)
    return load_rows(ptr + head.to(tl.int64) * strides[2], 1, at, valid, WIDTH, PADDED)


@triton.jit
def _factors(factors_ptr, flat, valid, n_seed, factor):
    """[M] float32: what the sums of each folded row are multiplied by."""
    value = tl.where(valid, factor, 0.0)
    if factors_ptr is not None:
        value *= tl.load(factors_ptr + flat // n_seed, mask=valid, other=0.0)
    return value


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def silu_rows(
    q_ptr,
    do_ptr,
    out_ptr,
    part_ptr,
    factors_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memory,
    extent_ptr,
    q_strides,
    do_strides,
    size,
    rows,
    segments,
    n_seed,
    heads,
    factor,
    scale,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BACKWARD: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of M folded query rows and one head, over the keys of one memory.

    Forward writes o [rows, n_seed, heads, DV]; `BACKWARD` the gradient of q [rows, n_seed, heads,
    D] from that of o, do_ptr. part_ptr: float32 like what is written, sums that an earlier launch,
    of another memory, leaves for a later one: read unless `FIRST`, written unless `LAST`.
    memory, extent_ptr, size: see target_attention's triton_device. order_ptr, offsets_ptr: of the
    memory's route. q_strides, do_strides: of rows, seeds and heads. factors_ptr: [rows] or None.
    """
    WIDTH: tl.constexpr = D if BACKWARD else DV
    PADDED: tl.constexpr = DP if BACKWARD else DVP
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    segment, begin, first, end = find_rows(offsets_ptr, live_ptr, segments, rows, tile, n_seed, M)
    end = tl.minimum(end, first + M)
    steps = first + tl.arange(0, M)
    valid = steps < end
    if segment == segments:
        if LAST:
            at = flat_rows(None, begin, steps, valid, n_seed) * heads + head
            store_rows(out_ptr, WIDTH, at, valid, tl.zeros((M, PADDED), tl.float32), WIDTH, PADDED)
    elif first < end:
        flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
        at = flat * heads + head
        q = _rows(q_ptr, flat, valid, n_seed, q_strides, head, D, DP)
        if BACKWARD:
            do = _rows(do_ptr, flat, valid, n_seed, do_strides, head, DV, DVP)
        sums = tl.zeros((M, PADDED), tl.float32)
        if not FIRST:
            sums = load_rows(part_ptr, WIDTH, at, valid, WIDTH, PADDED)
        k_ptr, v_ptr, length, start = locate(memory, extent_ptr, size, segment, head // memory[12])
        for low in tl.range(0, length, N, num_stages=STAGES):
            keys = low + tl.arange(0, N)
            seen = seen_keys(memory, start, keys, keys < length)
            k = load_rows(k_ptr, memory[5], keys, seen, D, DP)
            v = load_rows(v_ptr, memory[8], keys, seen, DV, DVP)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            bias = _bias(memory, start, head, keys, seen)
            if bias is not None:
                scores += bias[None, :]
            gates = tl.sigmoid(scores)
            if BACKWARD:
                weights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                weights *= _slope(scores, gates)
                sums = _product(tl.where(seen[None, :], weights, 0.0), k, sums, PRECISION)
            else:
                weights = tl.where(seen[None, :], scores * gates, 0.0)
                sums = _product(weights, v, sums, PRECISION)
        if LAST:
            over = _factors(factors_ptr, flat, valid, n_seed, factor)
            if BACKWARD:
                over *= scale
            store_rows(out_ptr, WIDTH, at, valid, sums * over[:, None], WIDTH, PADDED)
        else:
            store_rows(part_ptr, WIDTH, at, valid, sums, WIDTH, PADDED)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def silu_keys(
    q_ptr,
    do_ptr,
    dk_ptr,
    dv_ptr,
    db_ptr,
    factors_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memory,
    extent_ptr,
    q_strides,
    do_strides,
    size,
    rows,
    owners,
    n_seed,
    heads,
    kv_heads,
    factor,
    scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of N keys of one row of a memory and one of the keys' heads, over all rows below it.

    dk_ptr, dv_ptr: contiguous, like k and v; db_ptr: float32 [entries, heads]; None: not wanted.
    Zeros are there already, and only keys that take part are written. The rest as in `silu_rows`.
    """
    kv_head = tl.program_id(0) % kv_heads
    owner, low = find_keys(
        extent_ptr, offsets_ptr, live_ptr, None, size, rows, owners,
        tl.program_id(0) // kv_heads, memory[4] is None, False, N,
    )  # fmt: skip
    if owner < owners:
        begin, count = find_queries(offsets_ptr, live_ptr, rows, owner, n_seed)
        k_ptr, v_ptr, length, start = locate(memory, extent_ptr, size, owner, kv_head)
        # Extents of dead rows may be anything.
        length = tl.where(count == 0, 0, length)
        count = tl.where(low < length, count, 0)
        keys = low + tl.arange(0, N)
        seen = seen_keys(memory, start, keys, keys < length)
        k = load_rows(k_ptr, memory[5], keys, seen, D, DP)
        v = load_rows(v_ptr, memory[8], keys, seen, DV, DVP)
        dk = tl.zeros((N, DP), tl.float32)
        dv = tl.zeros((N, DVP), tl.float32)
        shared = heads // kv_heads
        for turn in range(shared):
            head = kv_head * shared + turn
            bias = _bias(memory, start, head, keys, seen)
            db = tl.zeros((N,), tl.float32)
            for at in tl.range(0, count, M, num_stages=STAGES):
                steps = at + tl.arange(0, M)
                valid = steps < count
                flat = flat_rows(order_ptr, begin, steps, valid, n_seed)
                q = _rows(q_ptr, flat, valid, n_seed, q_strides, head, D, DP)
                do = _rows(do_ptr, flat, valid, n_seed, do_strides, head, DV, DVP)
                over = _factors(factors_ptr, flat, valid, n_seed, factor)[None, :]
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
                if bias is not None:
                    scores += bias[:, None]
                gates = tl.sigmoid(scores)
                if dv_ptr is not None:
                    weights = tl.where(valid[None, :], scores * gates * over, 0.0)
                    dv = _product(weights, do, dv, PRECISION)
                if dk_ptr is not None or db_ptr is not None:
                    ds = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                    ds = tl.where(valid[None, :], ds * _slope(scores, gates) * over, 0.0)
                    if dk_ptr is not None:
                        dk = _product(ds, q, dk, PRECISION)
                    if db_ptr is not None:
                        db += tl.sum(ds, axis=1)
            if db_ptr is not None:
                tl.store(db_ptr + (start + keys) * heads + head, db, mask=seen)
        at = (start + keys) * kv_heads + kv_head
        if dk_ptr is not None:
            store_rows(dk_ptr, D, at, seen, dk * scale, D, DP)
        if dv_ptr is not None:
            store_rows(dv_ptr, DV, at, seen, dv, DV, DVP)
