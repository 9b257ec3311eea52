"""The producer of the Hopper gradient kernel of queries: one warp that fetches by TMA."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.common.gluon_lib import tma_load
from ikbo_tree.kernels.target_attention.gluon_boards import word
from ikbo_tree.kernels.target_attention.gluon_device import advance
from ikbo_tree.kernels.target_attention.gluon_queries_device import (
    BLOCKS,
    HALF,
    HEAD,
    LAST,
    OWNER,
    ROW,
    ROWS,
    START,
)


@gluon.jit
def _fetch(k_desc, v_desc, owner, at, head, ring, stage, phase):
    """A block of keys and values into the next stage once it is free.

    Rows beyond the end of a tensor arrive as zeros, and count as bytes.
    """
    k_bufs, v_bufs, full, empty = ring
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(bar, 2 * k_bufs.shape[2] * k_bufs.shape[4] * 2)
    tma_load(k_desc, [owner, at, head, 0], bar, k_bufs.index(stage))
    tma_load(v_desc, [owner, at, head, 0], bar, v_bufs.index(stage))
    return advance(stage, phase, k_bufs.shape[0])


@gluon.jit
def producer(
    board,
    told,
    rows_of,
    ring,
    row_descs,
    k_descs,
    v_descs,
    BN: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Fetches query rows, keys and values of one work after another, in the consumers' order.

    rows_of: (buffers, q_full, q_empty), two buffers for each of row_descs. Stages are free at
    first, as a fresh barrier counts as passed with parity 1.
    """
    row_bufs, q_full, q_empty = rows_of
    COUNT: gl.constexpr = len(k_descs)
    KINDS: gl.constexpr = len(row_descs)
    stage = 0
    phase = 1
    n = 0
    mbarrier.wait(told.index(0), 0)
    rows = word(board, 0, ROWS)
    while rows > 0:
        b = n % 2
        head = word(board, b, HEAD)
        mbarrier.wait(q_empty, (n & 1) ^ 1)
        mbarrier.expect(q_full, KINDS * 2 * row_bufs.shape[2] * row_bufs.shape[4] * 2)
        for i in gl.static_range(KINDS):
            for c in gl.static_range(2):
                at_all = [0, word(board, b, ROW) + HALF * c, head, 0]
                tma_load(row_descs[i], at_all, q_full, row_bufs.index(2 * i + c))
        for i in gl.static_range(COUNT):
            if word(board, b, BLOCKS + i) > 0:
                owner = word(board, b, OWNER + i)
                at = word(board, b, LAST + i)
                stage, phase = _fetch(
                    k_descs[i], v_descs[i], owner, at, head // GROUPS[i], ring, stage, phase
                )
        for i in gl.static_range(COUNT):
            owner = word(board, b, OWNER + i)
            at = word(board, b, START + i)
            for _ in range(word(board, b, BLOCKS + i) - 1):
                stage, phase = _fetch(
                    k_descs[i], v_descs[i], owner, at, head // GROUPS[i], ring, stage, phase
                )
                at += BN
        n += 1
        mbarrier.wait(told.index(n % 2), (n // 2) & 1)
        rows = word(board, n % 2, ROWS)
    # Both waits: the barrier's phase must be the one that the consumers wait for.
    mbarrier.wait(q_empty, (n & 1) ^ 1)
    mbarrier.arrive(q_full)
