"""A consumer of the Hopper gradient kernel of queries: four warps, 64 query rows of each tile."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ikbo_tree.kernels.common.gluon_fragments import accumulator_layout
from ikbo_tree.kernels.common.gluon_lib import cta_sync, tma_store
from ikbo_tree.kernels.target_attention.gluon_boards import clear_behind, word
from ikbo_tree.kernels.target_attention.gluon_device import advance, matrix
from ikbo_tree.kernels.target_attention.gluon_queries_device import (
    HALF,
    HEAD,
    HIGH,
    ITEM,
    LOW,
    ROW,
    ROWS,
    SPANS,
    STEPS,
)

LOG2E = gl.constexpr(1.4426950408889634)
HALF_UNIT = gl.constexpr(2.0**-11)
BFLOAT_UNIT = gl.constexpr(2.0**-8)


@gluon.jit
def _partial(x):
    """Row sums of each thread's own columns, [64, 8], with no shuffles."""
    return gl.sum(x.reshape([HALF, x.shape[1] // 8, 8]), 1)


@gluon.jit
def _step(sums, q, do, lse2, delta, ring, stage, phase, scale2, low, high, SUMS: gl.constexpr):
    """Adds a block of keys, of which columns low to high - 1 count, to the sums.

    They are dQ / scale and, with SUMS, each row's sum of dS, of its squares, of the squares of P.
    """
    dq, miss, ds_squares, p_squares = sums
    k_bufs, v_bufs, full, _ = ring
    BN: gl.constexpr = k_bufs.shape[2]
    DP: gl.constexpr = k_bufs.shape[4]
    mma_s: gl.constexpr = accumulator_layout(BN)
    left_operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DP), 2)
    zero = gl.zeros((HALF, BN), gl.float32, mma_s)
    mbarrier.wait(full.index(stage), phase)
    if high < BN:
        clear_behind(k_bufs, stage, high)
        clear_behind(v_bufs, stage, high)
    k = matrix(k_bufs.index(stage), BN, DP)
    v = matrix(v_bufs.index(stage), BN, DP)
    s_token = warpgroup_mma(q, k.permute((1, 0)), zero, is_async=True)
    dp_token = warpgroup_mma(do, v.permute((1, 0)), zero, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    p = gl.exp2(s * scale2 - lse2[:, None])
    if (low > 0) | (high < BN):
        beyond = gl.arange(0, BN, gl.SliceLayout(0, mma_s)) - low
        counts = beyond.to(gl.uint32) < (high - low).to(gl.uint32)
        p = gl.where(counts[None, :], p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp_token,))
    ds = p * (dp - delta[:, None])
    ds16 = gl.convert_layout(ds.to(k_bufs.dtype), left_operand)
    dq_token = warpgroup_mma(ds16, k, dq, is_async=True)
    if SUMS:
        miss = miss + _partial(ds)
        ds_squares = ds_squares + _partial(ds * ds)
        p_squares = p_squares + _partial(p * p)
    return warpgroup_mma_wait(0, deps=(dq_token,)), miss, ds_squares, p_squares


@gluon.jit
def _too_far(miss, ds_squares, p_squares, DT: gl.constexpr):
    """Which rows' dQ would show that delta is off by `miss`: see the Triton path."""
    unit: gl.constexpr = HALF_UNIT if gl.float16 == DT else BFLOAT_UNIT
    noise = unit * gl.sqrt(ds_squares)
    miss = gl.abs(miss)
    return (miss * gl.sqrt(p_squares) > 0.5 * noise) | (miss > 2.0 * noise)


@gluon.jit
def _store_some(dq, ptr, row, head, wanted, H: gl.constexpr, D: gl.constexpr):
    """Writes the gradient of those of 64 rows that are wanted."""
    of_q: gl.constexpr = gl.SliceLayout(1, dq.type.layout)
    steps = gl.arange(0, HALF, of_q)
    columns = gl.arange(0, dq.shape[1], gl.SliceLayout(0, dq.type.layout))
    base = ptr + (row.to(gl.int64) * H + head) * D
    mask = gl.convert_layout(wanted, of_q)[:, None] & (columns < D)[None, :]
    out = dq.to(ptr.dtype.element_ty)
    gl.store(base + (steps * (H * D))[:, None] + columns[None, :], out, mask=mask)


@gluon.jit
def _store(dq, buf, desc, ptr, row, left, head, inside, H: gl.constexpr, D: gl.constexpr):
    """Writes the gradient of 64 rows, or of as many as are left."""
    if left >= HALF:
        matrix(buf, HALF, dq.shape[1]).store(dq.to(buf.dtype))
        # The copy reads what all threads have written: the compiler adds the barrier.
        fence_async_shared()
        tma_store(desc, [0, row, head, 0], buf)
    elif left > 0:
        # A box of 64 rows would overwrite the next segment's.
        _store_some(dq, ptr, row, head, inside, H, D)


@gluon.jit
def consumer(
    WHICH: gl.constexpr,
    board,
    freed,
    rows_of,
    out_bufs,
    ring,
    results,
    known,
    stats_pitch,
    scales,
    H: gl.constexpr,
    D: gl.constexpr,
    AGAIN: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Gradients of rows `64 * WHICH` to `64 * WHICH + 63` of one work after another.

    results: (dq_desc, dq_ptr, stats_ptr, far_ptr, again_ptr); known: (lse_ptr, dlse_ptr).
    """
    row_bufs, q_full, q_empty = rows_of
    k_bufs, _, _, empty = ring
    dq_desc, dq_ptr, stats_ptr, far_ptr, again_ptr = results
    lse_ptr, dlse_ptr = known
    scale, scale2 = scales
    DT: gl.constexpr = k_bufs.dtype
    STAGES: gl.constexpr = k_bufs.shape[0]
    BN: gl.constexpr = k_bufs.shape[2]
    DP: gl.constexpr = k_bufs.shape[4]
    mma_q: gl.constexpr = accumulator_layout(DP)
    of_s: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BN))
    left_operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(BN), 2)
    steps_s = gl.arange(0, HALF, of_s)
    stage = 0
    phase = 0
    n = 0
    mbarrier.wait(q_full, 0)
    rows = word(board, 0, ROWS)
    while rows > 0:
        b = n % 2
        row = word(board, b, ROW) + HALF * WHICH
        head = word(board, b, HEAD)
        left = rows - HALF * WHICH
        inside = steps_s < left
        column = head.to(gl.int64) * stats_pitch + row + steps_s
        at = (row.to(gl.int64) + steps_s) * H + head
        lse = gl.load(lse_ptr + at, mask=inside, other=float("-inf"))
        lse2 = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        dlse = gl.zeros((HALF,), gl.float32, of_s)
        if AGAIN:
            delta = gl.load(
                stats_ptr + stats_pitch.to(gl.int64) * H + column, mask=inside, other=0.0
            )
        else:
            if dlse_ptr is not None:
                dlse = gl.load(dlse_ptr + at, mask=inside, other=0.0).to(gl.float32)
            o = matrix(row_bufs.index(4 + WHICH), HALF, DP).load(mma_q).to(gl.float32)
            o *= matrix(row_bufs.index(2 + WHICH), HALF, DP).load(mma_q).to(gl.float32)
            delta = gl.convert_layout(gl.sum(o, 1), of_s) - dlse
        q = matrix(row_bufs.index(WHICH), HALF, DP)
        do = matrix(row_bufs.index(2 + WHICH), HALF, DP)
        if SHARED < 1:
            q = q.load(left_operand)
        if SHARED < 2:
            do = do.load(left_operand)
        # The next copy comes behind these reads.
        fence_async_shared()
        # The previous work's results have long left their buffer: one thread knows, then all do.
        tma.store_wait(0)
        cta_sync()
        if SHARED == 0:
            mbarrier.arrive(q_empty)
        nothing = _partial(gl.zeros((HALF, BN), gl.float32, accumulator_layout(BN)))
        sums = (gl.zeros((HALF, DP), gl.float32, mma_q), nothing, nothing, nothing)
        spans = word(board, b, SPANS)
        for i in range(word(board, b, STEPS)):
            low = gl.to_tensor(0)
            high = gl.to_tensor(BN)
            if i < spans:
                low = word(board, b, LOW + i)
                high = word(board, b, HIGH + i)
            sums = _step(sums, q, do, lse2, delta, ring, stage, phase, scale2, low, high, not AGAIN)
            mbarrier.arrive(empty.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        if SHARED > 0:
            mbarrier.arrive(q_empty)
        if AGAIN:
            wanted = gl.load(far_ptr + column, mask=inside, other=0) != 0
            _store_some(sums[0] * scale, dq_ptr, row, head, wanted, H, D)
        else:
            miss = gl.convert_layout(gl.sum(sums[1], 1), of_s) - dlse
            ds_squares = gl.convert_layout(gl.sum(sums[2], 1), of_s)
            p_squares = gl.convert_layout(gl.sum(sums[3], 1), of_s)
            far = _too_far(miss, ds_squares, p_squares, DT) & inside
            deltas = stats_ptr + stats_pitch.to(gl.int64) * H
            gl.store(stats_ptr + column, lse2, mask=inside)
            gl.store(deltas + column, delta + miss, mask=inside)
            gl.store(far_ptr + column, far.to(gl.int8), mask=inside)
            gl.store(again_ptr + word(board, b, ITEM) + steps_s * 0, 1, mask=far)
            out = out_bufs.index(WHICH)
            _store(sums[0] * scale, out, dq_desc, dq_ptr, row, left, head, inside, H, D)
        mbarrier.arrive(freed.index(b))
        n += 1
        mbarrier.wait(q_full, n & 1)
        rows = word(board, n % 2, ROWS)
    tma.store_wait(0)
