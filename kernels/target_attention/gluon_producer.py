"""The producer of the Hopper attention kernel: one warp that keeps copies by TMA in flight."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.common.gluon_lib import tma_load
from ikbo_tree.kernels.target_attention.gluon_boards import word
from ikbo_tree.kernels.target_attention.gluon_device import (
    BLOCKS,
    HALF,
    HEAD,
    LAST,
    OWNER,
    ROW,
    ROWS,
    SPACE,
    START,
    advance,
)


@gluon.jit
def _fetch(descs, which, owner, at, head, ring, slot, phase, GROUPS: gl.constexpr):
    """A block of keys or values, by descriptor number `which`, into the next slot once it is free.

    Rows beyond the end of a tensor arrive as zeros, and count as bytes.
    """
    kv_bufs, kv_full, kv_empty = ring
    SLOTS: gl.constexpr = kv_bufs.shape[0]
    BYTES: gl.constexpr = kv_bufs.shape[2] * kv_bufs.shape[4] * 2
    full = kv_full.index(slot)
    mbarrier.wait(kv_empty.index(slot), phase)
    mbarrier.expect(full, BYTES)
    for i in gl.static_range(len(descs)):
        at_all = [owner, at, head // GROUPS[i], 0]
        tma_load(descs[i], at_all, full, kv_bufs.index(slot), pred=which == i)
    return advance(slot, phase, SLOTS)


@gluon.jit
def producer(
    board,
    told,
    q_full,
    ring,
    q_bufs,
    q_descs,
    k_descs,
    v_descs,
    BN: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Fetches queries, keys and values of one work after another, in the consumers' order.

    A work's blocks go K0, K1, V0, K2, V1, ...: scores are one block ahead of the values. Slots are
    free at first, as a fresh barrier counts as passed with parity 1.
    """
    COUNT: gl.constexpr = len(k_descs)
    BYTES: gl.constexpr = 2 * q_bufs.shape[1] * q_bufs.shape[3] * 2
    slot = 0
    phase = 1
    n = 0
    mbarrier.wait(told.index(0), 0)
    rows = word(board, 0, ROWS)
    while rows > 0:
        b = n % 2
        head = word(board, b, HEAD)
        # The scheduler has waited until the buffer was free.
        mbarrier.expect(q_full.index(b), BYTES)
        for c in gl.static_range(2):
            at_all = [word(board, b, ROW) + HALF * c, head, 0]
            if len(q_descs) == 1:
                tma_load(q_descs[0], at_all, q_full.index(b), q_bufs.index(b * 2 + c))
            else:
                for i in gl.static_range(len(q_descs)):
                    mine = word(board, b, SPACE) == i
                    tma_load(
                        q_descs[i], at_all, q_full.index(b), q_bufs.index(b * 2 + c), pred=mine
                    )
        # Whose values come next, and which: none yet.
        which = gl.to_tensor(-1)
        owner = gl.to_tensor(0)
        at = gl.to_tensor(0)
        for i in gl.static_range(COUNT):
            if word(board, b, BLOCKS + i) > 0:
                k_owner = word(board, b, OWNER + i)
                k_at = word(board, b, LAST + i)
                slot, phase = _fetch(k_descs, i, k_owner, k_at, head, ring, slot, phase, GROUPS)
                if which >= 0:
                    slot, phase = _fetch(v_descs, which, owner, at, head, ring, slot, phase, GROUPS)
                which = gl.to_tensor(i)
                owner = k_owner
                at = k_at
        for i in gl.static_range(COUNT):
            k_owner = word(board, b, OWNER + i)
            k_at = word(board, b, START + i)
            for _ in range(word(board, b, BLOCKS + i) - 1):
                slot, phase = _fetch(k_descs, i, k_owner, k_at, head, ring, slot, phase, GROUPS)
                slot, phase = _fetch(v_descs, which, owner, at, head, ring, slot, phase, GROUPS)
                which = gl.to_tensor(i)
                owner = k_owner + 0
                at = k_at + 0
                k_at = k_at + BN
        slot, phase = _fetch(v_descs, which, owner, at, head, ring, slot, phase, GROUPS)
        n += 1
        mbarrier.wait(told.index(n % 2), (n // 2) & 1)
        rows = word(board, n % 2, ROWS)
    mbarrier.arrive(q_full.index(n % 2))
