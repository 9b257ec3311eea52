"""A consumer of the Hopper gradient kernel of keys and values: four warps, 64 keys of each tile."""

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
from ikbo_tree.kernels.common.gluon_lib import tma_store
from ikbo_tree.kernels.target_attention.gluon_boards import clear_behind, word
from ikbo_tree.kernels.target_attention.gluon_device import advance, matrix
from ikbo_tree.kernels.target_attention.gluon_keys_device import (
    ADDS,
    BLOCK,
    ENDS,
    HALF,
    HEAD,
    KEY,
    KEYS,
    KEYS_TILE,
    OWNER,
    ROWS,
    SLOT,
    STEPS,
)


@gluon.jit
def _step(sums, kv, mine, ring, stage, phase, left, scale2, EARLY: gl.constexpr):
    """Adds a block of query rows, of which the first `left` count, to (dK / scale, dV).

    EARLY: weights are computed before the wait for dP, beside the instructions that it is for.
    """
    q_bufs, do_bufs, stats, full, _ = ring
    dk, dv = sums
    k_bufs, v_bufs, _, _ = kv
    DT: gl.constexpr = q_bufs.dtype
    DP: gl.constexpr = q_bufs.shape[4]
    mma_s: gl.constexpr = accumulator_layout(BLOCK)
    columns: gl.constexpr = gl.SliceLayout(0, mma_s)
    # Weights stay in registers: the layout of scores is that of a left operand.
    left_operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(DP), 2)
    zero = gl.zeros((HALF, BLOCK), gl.float32, mma_s)
    mbarrier.wait(full.index(stage), phase)
    if left < BLOCK:
        clear_behind(q_bufs, stage, left)
        clear_behind(do_bufs, stage, left)
    # Adds 0, but not to the compiler, which would keep 16 addresses from step to step.
    mine += gl.minimum(left, 0)
    k = matrix(k_bufs.index(mine), HALF, DP)
    v = matrix(v_bufs.index(mine), HALF, DP)
    q = matrix(q_bufs.index(stage), BLOCK, DP)
    do = matrix(do_bufs.index(stage), BLOCK, DP)
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, is_async=True)
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, is_async=True)
    lse2 = stats.index(2 * stage).load(columns)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    p = gl.exp2(s * scale2 - lse2[None, :])
    p16 = gl.convert_layout(p.to(DT), left_operand)
    if EARLY:
        # The assembler moves waits up, but not across this, which is over already.
        mbarrier.wait(full.index(stage), phase)
    dp = warpgroup_mma_wait(0, deps=(dp_token,))
    dv_token = warpgroup_mma(p16, do, dv, is_async=True)
    delta = stats.index(2 * stage + 1).load(columns)
    ds = p * (dp - delta[None, :])
    ds16 = gl.convert_layout(ds.to(DT), left_operand)
    dk_token = warpgroup_mma(ds16, q, dk, is_async=True)
    return warpgroup_mma_wait(0, deps=(dk_token, dv_token))


@gluon.jit
def _part_pointers(part_ptr, slot, WHICH: gl.constexpr, like):
    """Where a consumer's sums of dK lie in a slot, a [2, 128, DP] of dK and dV."""
    DP: gl.constexpr = like.shape[1]
    rows = gl.arange(0, HALF, gl.SliceLayout(1, like.type.layout))
    columns = gl.arange(0, DP, gl.SliceLayout(0, like.type.layout))
    base = part_ptr + slot.to(gl.int64) * (2 * KEYS_TILE * DP) + HALF * WHICH * DP
    return base + (rows * DP)[:, None] + columns[None, :]


@gluon.jit
def _store(x, buf, desc, ptr, place, key, keys, HKV: gl.constexpr, D: gl.constexpr):
    """Writes a gradient of a packed memory's 64 keys from `key` on, of which `keys` exist.

    It goes through the buffer that held the keys or values. place: the descriptor's row, the head.
    """
    owner, head = place
    DP: gl.constexpr = x.shape[1]
    out = x.to(buf.dtype)
    if keys >= HALF:
        matrix(buf, HALF, DP).store(out)
        # The copy reads what all threads have written: the compiler adds the barrier.
        fence_async_shared()
        tma_store(desc, [owner, key, head, 0], buf)
    elif keys > 0:
        # A box of 64 keys would overwrite the next row's.
        rows = gl.arange(0, HALF, gl.SliceLayout(1, x.type.layout))
        columns = gl.arange(0, DP, gl.SliceLayout(0, x.type.layout))
        base = ptr + (key.to(gl.int64) * HKV + head) * D
        mask = (rows < keys)[:, None] & (columns < D)[None, :]
        gl.store(base + (rows * (HKV * D))[:, None] + columns[None, :], out, mask=mask)


@gluon.jit
def _store_padded(sums, bufs, results, place, key, keys, size):
    """Likewise both of a padded memory, with zeros behind the keys; copies end with the row."""
    dk, dv = sums
    k_buf, v_buf = bufs
    dk_desc, dv_desc, _, _, _ = results
    owner, head = place
    DP: gl.constexpr = dk.shape[1]
    counts = (gl.arange(0, HALF, gl.SliceLayout(1, dk.type.layout)) < keys)[:, None]
    if key < size:
        matrix(k_buf, HALF, DP).store(gl.where(counts, dk, 0.0).to(k_buf.dtype))
        matrix(v_buf, HALF, DP).store(gl.where(counts, dv, 0.0).to(k_buf.dtype))
        fence_async_shared()
        tma_store(dk_desc, [owner, key, head, 0], k_buf)
        tma_store(dv_desc, [owner, key, head, 0], v_buf)


@gluon.jit
def consumer(
    WHICH: gl.constexpr,
    board,
    kv,
    ring,
    results,
    scales,
    size,
    HKV: gl.constexpr,
    D: gl.constexpr,
    PACKED: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Gradients of keys `64 * WHICH` to `64 * WHICH + 63` of one work after another.

    Nothing orders the two consumers: what one does between its matrix instructions, the other's
    hide.
    """
    k_bufs, v_bufs, kv_full, kv_empty = kv
    q_bufs, _, _, _, empty = ring
    _, _, _, _, part_ptr = results
    scale, scale2 = scales
    STAGES: gl.constexpr = q_bufs.shape[0]
    DP: gl.constexpr = k_bufs.shape[4]
    mma: gl.constexpr = accumulator_layout(DP)
    stage = 0
    phase = 0
    n = 0
    mbarrier.wait(kv_full.index(0), 0)
    steps = word(board, 0, STEPS)
    while steps > 0:
        b = n & 1
        rows = word(board, b, ROWS)
        sums = (gl.zeros((HALF, DP), gl.float32, mma), gl.zeros((HALF, DP), gl.float32, mma))
        left = rows + 0
        for i in range(steps):
            sums = _step(sums, kv, 2 * b + WHICH, ring, stage, phase, left, scale2, EARLY)
            mbarrier.arrive(empty.index(stage))
            stage, phase = advance(stage, phase, STAGES)
            # The next head's rows begin behind the last block.
            left = gl.where(left > BLOCK, left - BLOCK, rows)
            if i == 0:
                # The previous work's results have long left its buffers.
                tma.store_wait(0)
                mbarrier.arrive(kv_empty.index((n + 1) & 1), pred=n > 0)
        dk, dv = sums
        slot = word(board, b, SLOT)
        if slot >= 0:
            at = _part_pointers(part_ptr, slot, WHICH, dk)
            if word(board, b, ADDS) > 0:
                dk = gl.load(at) + dk
                dv = gl.load(at + KEYS_TILE * DP) + dv
            if word(board, b, ENDS) == 0:
                # The same threads read it.
                gl.store(at, dk)
                gl.store(at + KEYS_TILE * DP, dv)
        if word(board, b, ENDS) > 0:
            owner = word(board, b, OWNER)
            key = word(board, b, KEY) + HALF * WHICH
            keys = word(board, b, KEYS) - HALF * WHICH
            head = word(board, b, HEAD)
            place = (owner, head)
            k_buf = k_bufs.index(2 * b + WHICH)
            v_buf = v_bufs.index(2 * b + WHICH)
            if PACKED:
                _store(dv, v_buf, results[1], results[3], place, key, keys, HKV, D)
                _store(dk * scale, k_buf, results[0], results[2], place, key, keys, HKV, D)
            else:
                _store_padded((dk * scale, dv), (k_buf, v_buf), results, place, key, keys, size)
        n += 1
        mbarrier.wait(kv_full.index(n & 1), (n >> 1) & 1)
        steps = word(board, n & 1, STEPS)
    tma.store_wait(0)
