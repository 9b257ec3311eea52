"""The producer of the Hopper gradient kernel of keys and values: one warp that fetches."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.common.gluon_lib import cta_sync, tma_load
from ikbo_tree.kernels.target_attention.gluon_boards import word
from ikbo_tree.kernels.target_attention.gluon_device import advance
from ikbo_tree.kernels.target_attention.gluon_keys_device import (
    BLOCK,
    HALF,
    HEAD,
    KEY,
    OWNER,
    ROW,
    ROWS,
    STEPS,
)

PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def producer(
    board,
    told,
    kv,
    ring,
    k_desc,
    v_desc,
    q_desc,
    do_desc,
    stats_ptr,
    stats_pitch,
    SHARED: gl.constexpr,
    H: gl.constexpr,
):
    """Fetches keys, values and blocks of query rows of one work after another.

    stats_ptr: [2, H, stats_pitch], log-sum-exp in units of log2 and delta of each folded row.
    SHARED: query heads a key head. Stages are free at first, as a fresh barrier counts as passed
    with parity 1.
    """
    k_bufs, v_bufs, kv_full, _ = kv
    q_bufs, do_bufs, stats, full, empty = ring
    STAGES: gl.constexpr = q_bufs.shape[0]
    DP: gl.constexpr = q_bufs.shape[4]
    lines = gl.arange(0, BLOCK, PAIRS)
    stage = 0
    phase = 1
    n = 0
    mbarrier.wait(told.index(0), 0)
    steps = word(board, 0, STEPS)
    while steps > 0:
        b = n % 2
        kv_head = word(board, b, HEAD)
        owner = word(board, b, OWNER)
        key = word(board, b, KEY)
        # The scheduler has waited until the buffers were free.
        mbarrier.expect(kv_full.index(b), 4 * HALF * DP * 2)
        for c in gl.static_range(2):
            at_all = [owner, key + HALF * c, kv_head, 0]
            tma_load(k_desc, at_all, kv_full.index(b), k_bufs.index(2 * b + c))
            tma_load(v_desc, at_all, kv_full.index(b), v_bufs.index(2 * b + c))
        first = word(board, b, ROW)
        rows = word(board, b, ROWS)
        head = kv_head * SHARED
        at = gl.to_tensor(0)
        for _turn in range(steps):
            # On their way while this waits for the stage.
            known = stats_ptr + head.to(gl.int64) * stats_pitch + first + at
            counts = lines < rows - at
            lse2 = gl.load(known + lines, mask=counts, other=float("inf"))
            known += stats_pitch.to(gl.int64) * H
            delta = gl.load(known + lines, mask=counts, other=0.0)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * BLOCK * DP * 2)
            at_all = [0, first + at, head, 0]
            tma_load(q_desc, at_all, full.index(stage), q_bufs.index(stage))
            tma_load(do_desc, at_all, full.index(stage), do_bufs.index(stage))
            stats.index(2 * stage).store(lse2)
            stats.index(2 * stage + 1).store(delta)
            cta_sync()
            mbarrier.arrive(full.index(stage))
            stage, phase = advance(stage, phase, STAGES)
            at += BLOCK
            head = gl.where(at < rows, head, head + 1)
            at = gl.where(at < rows, at, 0)
        n += 1
        mbarrier.wait(told.index(n % 2), (n // 2) & 1)
        steps = word(board, n % 2, STEPS)
    mbarrier.arrive(kv_full.index(n % 2))
