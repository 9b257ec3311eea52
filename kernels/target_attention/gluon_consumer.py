"""A consumer of the Hopper attention kernel: four warps that compute 64 query rows of each tile."""

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

from ikbo_tree.kernels.common.gluon_lib import tma_store
from ikbo_tree.kernels.target_attention.gluon_boards import clear_behind, word
from ikbo_tree.kernels.target_attention.gluon_device import (
    DIAGONAL,
    HALF,
    HEAD,
    HIGH,
    LOW,
    ROW,
    ROWS,
    SMALLEST,
    SPACE,
    SPANS,
    WHOLE,
    advance,
    matrix,
)

LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _accumulator(columns):
    """Layout of a matrix product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _issue_scores(q, k, zero, D: gl.constexpr):
    """Starts Q K^T; `zero` costs no registers. Columns of both beyond D are zeros."""
    DP: gl.constexpr = q.shape[1]
    # D is a power of two, or one and a half times one: 64 + 32, 128 + 64.
    W: gl.constexpr = D if D == DP else DP // 2
    token = warpgroup_mma(q.slice(0, W, 1), k.slice(0, W, 1).permute((1, 0)), zero, is_async=True)
    if W < D:
        token = warpgroup_mma(
            q.slice(W, D - W, 1), k.slice(W, D - W, 1).permute((1, 0)), token, is_async=True
        )
    return token


@gluon.jit
def _masked(s, low, high, diagonal, NEGATIVE: gl.constexpr):
    """Scores whose column does not count become what `exp2` makes 0 of.

    diagonal: the last column that row 0 sees, row 1 sees one more; None: rows see all.
    """
    columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    counts = ((columns >= low) & (columns < high))[None, :]
    if diagonal is not None:
        rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        counts = counts & (columns[None, :] <= (rows + diagonal)[:, None])
    return gl.where(counts, s, float("inf") if NEGATIVE else float("-inf"))


@gluon.jit
def _peak(s, scale2, NEGATIVE: gl.constexpr):
    """The largest scaled score of each row."""
    extreme = gl.min(s, 1) if NEGATIVE else gl.max(s, 1)
    return extreme * scale2


@gluon.jit
def _sums(p, LATE: gl.constexpr):
    """Row sums of the weights; LATE: of each thread's own columns, [64, 8], with no shuffles."""
    if LATE:
        p = p.reshape([HALF, p.shape[1] // 8, 8])
    return gl.sum(p, 1)


@gluon.jit
def _decayed(total, decay):
    """Row sums under a new maximum."""
    if len(total.shape) == 2:
        decay = gl.convert_layout(decay, gl.SliceLayout(1, total.type.layout))[:, None]
    return total * decay


@gluon.jit
def _step(
    state,
    q,
    ring,
    slot,
    phase,
    scale2,
    low,
    high,
    diagonal,
    MASKED: gl.constexpr,
    D: gl.constexpr,
    NEGATIVE: gl.constexpr,
):
    """Scores of one block of keys, and beside them the weighted values of the block before.

    Matrix instructions end in order, so that the scores are there while the values still run.
    Nothing is in flight at the end: ptxas would serialise a loop that leaves something.
    """
    kv_bufs, kv_full, kv_empty = ring
    peak, total, o, p16 = state
    SLOTS: gl.constexpr = kv_bufs.shape[0]
    BN: gl.constexpr = kv_bufs.shape[2]
    DP: gl.constexpr = kv_bufs.shape[4]
    zero = gl.zeros((HALF, BN), gl.float32, _accumulator(BN))
    mbarrier.wait(kv_full.index(slot), phase)
    s_token = _issue_scores(q, matrix(kv_bufs.index(slot), BN, DP), zero, D)
    k_slot = slot
    slot, phase = advance(slot, phase, SLOTS)
    mbarrier.wait(kv_full.index(slot), phase)
    o_token = warpgroup_mma(p16, matrix(kv_bufs.index(slot), BN, DP), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    mbarrier.arrive(kv_empty.index(k_slot))
    if MASKED:
        s = _masked(s, low, high, diagonal, NEGATIVE)
    now = gl.maximum(peak, _peak(s, scale2, NEGATIVE))
    decay = gl.exp2(peak - now)
    p = gl.exp2(s * scale2 - now[:, None])
    total = _decayed(total, decay) + _sums(p, len(total.shape) == 2)
    o = warpgroup_mma_wait(0, deps=(o_token,))
    mbarrier.arrive(kv_empty.index(slot))
    slot, phase = advance(slot, phase, SLOTS)
    o = o * gl.convert_layout(decay, gl.SliceLayout(1, o.type.layout))[:, None]
    p16 = gl.convert_layout(p.to(p16.dtype), p16.type.layout)
    return (now, total, o, p16), slot, phase


@gluon.jit
def _clear_tail(ring, slot, phase, high, more):
    """Clears the block of values of the keys just scored, whose tail may be anything.

    It is in this slot, or behind the next keys where there are any.
    """
    kv_bufs, kv_full, _ = ring
    SLOTS: gl.constexpr = kv_bufs.shape[0]
    if high < kv_bufs.shape[2]:
        next_slot, next_phase = advance(slot, phase, SLOTS)
        v_slot = gl.where(more, next_slot, slot)
        mbarrier.wait(kv_full.index(v_slot), gl.where(more, next_phase, phase))
        clear_behind(kv_bufs, v_slot, high)


@gluon.jit
def _store(
    q_buf, peak, total, o, row, left, head, space, results, H: gl.constexpr, D: gl.constexpr
):
    """Writes the results of up to 64 rows, through the buffer that held their queries."""
    o_desc, o_ptr, lse_ptr = results[0]
    if len(results) > 1:
        o_ptr = gl.where(space == 0, o_ptr, results[1][1])
        lse_ptr = gl.where(space == 0, lse_ptr, results[1][2])
    DP: gl.constexpr = o.shape[1]
    of_s: gl.constexpr = peak.type.layout
    of_o: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    if len(total.shape) == 2:
        total = gl.convert_layout(gl.sum(total, 1), of_s)
    out = (o * gl.convert_layout(1.0 / total, of_o)[:, None]).to(q_buf.dtype)
    steps = gl.arange(0, HALF, of_s)
    at = (row + steps).to(gl.int64) * H + head
    gl.store(lse_ptr + at, (peak + gl.log2(total)) * LN2, mask=steps < left)
    if left >= HALF:
        matrix(q_buf, HALF, DP).store(out)
        # The copy reads what all threads have written: the compiler adds the barrier.
        fence_async_shared()
        if len(results) == 1 or space == 0:
            tma_store(o_desc, [row, head, 0], q_buf)
        else:
            tma_store(results[1][0], [row, head, 0], q_buf)
    elif left > 0:
        # A box of 64 rows would overwrite the next segment's.
        steps_o = gl.arange(0, HALF, of_o)
        columns = gl.arange(0, DP, gl.SliceLayout(0, o.type.layout))
        base = o_ptr + (row.to(gl.int64) * H + head) * D
        mask = (steps_o < left)[:, None] & (columns < D)[None, :]
        gl.store(base + (steps_o * (H * D))[:, None] + columns[None, :], out, mask=mask)


@gluon.jit
def consumer(
    WHICH: gl.constexpr,
    board,
    q_bufs,
    q_full,
    q_empty,
    ring,
    results,
    scale2,
    H: gl.constexpr,
    D: gl.constexpr,
    SEVERAL: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEGATIVE: gl.constexpr,
    LATE: gl.constexpr,
):
    """Attention of rows `64 * WHICH` to `64 * WHICH + 63` of one work after another.

    Behind a work's last product with values come the first scores of the next one, which run while
    the results are stored: matrix instructions never wait for an epilogue. Nothing orders the two
    consumers; they fall into opposite phases by themselves.

    results: (o_desc, o_ptr, lse_ptr) of each space. SEVERAL: a work may have several memories, and
    so several last blocks. CAUSAL: own rows see no later key. LATE: row sums are added up across
    threads at a work's end only.
    """
    kv_bufs, kv_full, kv_empty = ring
    DT: gl.constexpr = q_bufs.dtype
    SLOTS: gl.constexpr = kv_bufs.shape[0]
    BN: gl.constexpr = kv_bufs.shape[2]
    DP: gl.constexpr = kv_bufs.shape[4]
    mma_o: gl.constexpr = _accumulator(DP)
    # Weights stay in registers: the layout of scores is that of a left operand.
    p_layout: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    zero = gl.zeros((HALF, BN), gl.float32, _accumulator(BN))
    slot = 0
    phase = 0
    n = 0
    mbarrier.wait(q_full.index(0), 0)
    rows = word(board, 0, ROWS)
    mbarrier.wait(kv_full.index(0), 0, pred=rows > 0)
    s_token = _issue_scores(
        matrix(q_bufs.index(WHICH), HALF, DP), matrix(kv_bufs.index(0), BN, DP), zero, D
    )
    while rows > 0:
        b = n % 2
        row = word(board, b, ROW) + HALF * WHICH
        head = word(board, b, HEAD)
        low = word(board, b, LOW)
        high = word(board, b, HIGH)
        whole = word(board, b, WHOLE)
        spans = word(board, b, SPANS) if SEVERAL else 1
        space = word(board, b, SPACE) if len(results) > 1 else 0
        diagonal = word(board, b, DIAGONAL) + HALF * WHICH if CAUSAL else None
        left = rows - HALF * WHICH
        q_buf = q_bufs.index(b * 2 + WHICH)
        q = matrix(q_buf, HALF, DP)
        # The first block: its scores were started before the loop, or behind the previous work.
        s = warpgroup_mma_wait(0, deps=(s_token,))
        mbarrier.arrive(kv_empty.index(slot))
        slot, phase = advance(slot, phase, SLOTS)
        # The previous work's results have long left its buffer.
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index((n + 1) % 2), pred=n > 0)
        cut = (low > 0) | (high < BN)
        if CAUSAL:
            cut = cut | (diagonal < BN)
        if cut:
            s = _masked(s, low, high, diagonal, NEGATIVE)
        # Fresh state: what was NaN in another work stays there.
        peak = _peak(s, scale2, NEGATIVE)
        p = gl.exp2(s * scale2 - peak[:, None])
        total = _sums(p, LATE)
        p16 = gl.convert_layout(p.to(DT), p_layout)
        o = gl.zeros((HALF, DP), gl.float32, mma_o)
        _clear_tail(ring, slot, phase, high, whole + spans > 1)
        state = (peak, total, o, p16)
        if SEVERAL:
            for i in range(1, spans):
                low = word(board, b, LOW + i)
                high = word(board, b, HIGH + i)
                if CAUSAL:
                    diagonal = word(board, b, DIAGONAL + i) + HALF * WHICH
                state, slot, phase = _step(
                    state, q, ring, slot, phase, scale2, low, high, diagonal, True, D, NEGATIVE
                )
                _clear_tail(ring, slot, phase, high, whole + spans > i + 1)
        for _ in range(whole):
            state, slot, phase = _step(
                state, q, ring, slot, phase, scale2, 0, BN, None, False, D, NEGATIVE
            )
        peak, total, o, p16 = state
        # Scores that a factor of SMALLEST stands in for are 0.
        peak = gl.where((scale2 == SMALLEST) & (gl.abs(peak) < 1.0), 0.0, peak)
        mbarrier.wait(kv_full.index(slot), phase)
        o_token = warpgroup_mma(p16, matrix(kv_bufs.index(slot), BN, DP), o, is_async=True)
        v_slot = slot
        slot, phase = advance(slot, phase, SLOTS)
        n += 1
        next_b = n % 2
        mbarrier.wait(q_full.index(next_b), (n // 2) & 1)
        rows = word(board, next_b, ROWS)
        mbarrier.wait(kv_full.index(slot), phase, pred=rows > 0)
        # Behind the last work this multiplies what lies there; nobody reads the result.
        s_token = _issue_scores(
            matrix(q_bufs.index(next_b * 2 + WHICH), HALF, DP),
            matrix(kv_bufs.index(slot), BN, DP),
            zero,
            D,
        )
        NEXT: gl.constexpr = 1 if D == DP else 2
        o = warpgroup_mma_wait(NEXT, deps=(o_token,))
        mbarrier.arrive(kv_empty.index(v_slot))
        _store(q_buf, peak, total, o, row, left, head, space, results, H, D)
    warpgroup_mma_wait(0, deps=(s_token,))
    tma.store_wait(0)
