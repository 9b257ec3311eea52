"""The two warpgroups that multiply: products, partial results, output."""

# mypy: disable-error-code="no-untyped-def, assignment, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ikbo_tree.kernels.common.gluon_fragments import accumulator_layout, halves
from ikbo_tree.kernels.common.gluon_lib import await_flag, cta_sync
from ikbo_tree.kernels.linear.gluon_config import BK
from ikbo_tree.kernels.linear.gluon_emit import emit, zero_dead_rows
from ikbo_tree.kernels.linear.gluon_mail import (
    BASE,
    BITS,
    COLUMN,
    COUNTER,
    END,
    HIGH,
    LEVEL,
    LIVE,
    LOW,
    PER_PRODUCER,
    ROW,
    STEPS,
    TARGET,
    await_message,
    read,
)
from ikbo_tree.kernels.linear.gluon_producer import LINE, counter_at
from ikbo_tree.kernels.linear.gluon_rows import load_rows

_BK = gl.constexpr(BK)


@gluon.jit
def consume(C: gl.constexpr, ring, mail, output, partial_ptr, work_ptr, sizes, FORM: gl.constexpr):
    """Multiplies row block C of every tile of this program, with all columns of the tile.

    Both read the same stage of W, at their own pace. A row block without live rows is left out.

    Args:
        C: 0 or 1.
        ring: `x_bufs`, `w_bufs`, `full`, `empty`.
        mail: see `gluon_mail`.
        output: the result, a descriptor or a pointer, or None where it is not in this launch;
            pieces of it in shared memory, as many for each consumer; the bias or None.
        partial_ptr: the partial results, see `gluon_rows`.
        work_ptr: tickets and counters.
        sizes: allocated and live rows of the result, and N.
        FORM: `gluon_config.Form`.
    """
    step = 0
    held = 0  # the tile before has kept the x slots of its last two stages
    number = 0
    args = (ring, mail, output, partial_ptr, work_ptr, sizes)
    await_message(mail, 0)
    bits = read(mail, 0, BITS)
    while bits != END:
        steps = read(mail, number, STEPS)
        row = read(mail, number, ROW) + C * 64
        if row < read(mail, number, LIVE):
            held = _tile(C, args, (bits, steps, row), (step, held, number), FORM)
        else:
            held = _pass(ring, step, steps, held, FORM)
            await_message(mail, number + 1)
        step += steps
        number += 1
        bits = read(mail, number, BITS)
    if FORM.result >= 0:
        zero_dead_rows(C, output, sizes, FORM)
    _leave(work_ptr, FORM)


@gluon.jit
def _leave(work_ptr, FORM: gl.constexpr):
    """The last consumer of the launch leaves tickets and counters as the next launch wants them."""
    cta_sync()
    LEVELS: gl.constexpr = FORM.levels
    left = gl.atomic_add(work_ptr + LINE, 1, sem="acq_rel", scope="gpu")
    if left == 2 * gl.num_programs(0) - 1:
        for i in gl.static_range(LEVELS + 2):
            gl.atomic_xchg(work_ptr + i * LINE, 0, sem="relaxed", scope="gpu")


@gluon.jit
def _pass(ring, step, steps, held, FORM: gl.constexpr):
    """A tile without this consumer: it gives all stages back."""
    tma.store_wait(0)
    if FORM.keep and FORM.BN == 256 and FORM.result >= 0 and FORM.described:
        _give_back(ring, step + FORM.stages - 2, held == 1, FORM)
        _give_back(ring, step + FORM.stages - 1, held == 1, FORM)
    for k in range(steps):
        s = (step + k) % FORM.stages
        mbarrier.wait(ring[2].index(s), ((step + k) // FORM.stages) & 1)
        _give_back(ring, step + k, True, FORM)
    return held - held


@gluon.jit
def _tile(C: gl.constexpr, args, message, state, FORM: gl.constexpr):
    """[64, BN] of a tile, until the next is known. Returns whether it keeps its last two stages.

    Bias and partials are added after the product, in float32 and in one order, whether they were
    there before it or not: when a level is done never shows in the bits of a result.
    """
    ring, mail, output, partial_ptr, work_ptr, sizes = args
    step, held, number = state
    bits, steps, row = message
    BN: gl.constexpr = FORM.BN
    PARTS: gl.constexpr = 2 if BN == 256 else 1
    PART: gl.constexpr = BN // PARTS
    EARLY: gl.constexpr = min(FORM.prefetch, PARTS) if FORM.join > 0 and FORM.ahead else 0
    KEEP: gl.constexpr = PARTS == 2 and FORM.keep and FORM.result >= 0 and FORM.described
    result = (bits & 1) == 1
    hold = result.to(gl.int32) if KEEP else 0
    ready = (bits & 4) == 4
    p_0, p_1 = 0, 0
    if not FORM.behind:
        p_0, p_1 = _fetch_parts(args, number, row, ready, EARLY, PART, FORM)
    acc = _begin(ring, step, held, C, FORM)
    if FORM.behind:
        p_0, p_1 = _fetch_parts(args, number, row, ready, EARLY, PART, FORM)
    acc = _continue(acc, ring, step, steps, hold, C, FORM)
    await_message(mail, number + 1)  # while the last product runs
    acc = _complete(acc, ring, step, steps, hold, FORM)
    JOINS: gl.constexpr = FORM.join > 0 and FORM.ahead
    first, second = None, None
    if FORM.result >= 0 and FORM.described:
        PIECES: gl.constexpr = min(2, BN // 64)
        first, second = output[1].index(PIECES * C), output[1].index(PIECES * C + PIECES - 1)
    if PARTS == 1:
        acc = _add_bias(acc, args, number, bits, 0, FORM)
        if JOINS:
            if EARLY == 0:
                p_0 = _fetch(args, number, row, ready, 0, 0, PART, FORM)
            acc = acc + p_0.to(gl.float32)
        acc = _add_late(acc, args, number, bits, row, 0, FORM)
        emit(output, partial_ptr, mail, number, acc, first, second, row, result, sizes, 0, FORM)
    else:
        left, right = halves(acc, BN)
        left = _add_bias(left, args, number, bits, 0, FORM)
        if JOINS:
            if EARLY == 0:
                p_0 = _fetch(args, number, row, ready, 0, 0, PART, FORM)
            left = left + p_0.to(gl.float32)
        left = _add_late(left, args, number, bits, row, 0, FORM)
        if JOINS and EARLY < 2 and FORM.described:  # on its way while the left half is stored
            p_1 = _fetch(args, number, row, ready, 0, PART, PART, FORM)
        emit(output, partial_ptr, mail, number, left, first, second, row, result, sizes, 0, FORM)
        right = _add_bias(right, args, number, bits, PART, FORM)
        if JOINS:
            if EARLY < 2 and not FORM.described:
                p_1 = _fetch(args, number, row, ready, 0, PART, PART, FORM)
            right = right + p_1.to(gl.float32)
        right = _add_late(right, args, number, bits, row, PART, FORM)
        if KEEP:
            # Its own x slots of the last two stages: its products are complete, nobody else reads
            # them, and they are laid out as pieces of the output are.
            first = ring[0].index((step + steps - 2) % FORM.stages * 2 + C)
            second = ring[0].index((step + steps - 1) % FORM.stages * 2 + C)
        elif FORM.result >= 0 and FORM.described:
            tma.store_wait(0)
            cta_sync()
        emit(
            output, partial_ptr, mail, number, right, first, second, row, result, sizes, PART, FORM
        )
    _count(mail, number, work_ptr, result, FORM)
    return hold


@gluon.jit
def _count(mail, number, work_ptr, result, FORM: gl.constexpr):
    """Counts a row block of a partial result as finished."""
    if FORM.result != 0:  # noqa: SIM102 - known when compiled
        if not result:
            # All threads of this consumer have stored their part; the release covers them.
            cta_sync()
            done_ptr = counter_at(work_ptr, read(mail, number, LEVEL))
            gl.atomic_add(done_ptr, 1, sem="release", scope="gpu")


@gluon.jit
def _fetch_parts(
    args, number, row, ready, EARLY: gl.constexpr, PART: gl.constexpr, FORM: gl.constexpr
):
    """The first EARLY parts of the partial that a tile adds first, on their way."""
    p_0, p_1 = 0, 0
    if EARLY > 0:
        p_0 = _fetch(args, number, row, ready, 0, 0, PART, FORM)
    if EARLY == 2:
        p_1 = _fetch(args, number, row, ready, 0, PART, PART, FORM)
    return p_0, p_1


@gluon.jit
def _fetch(
    args, number, row, wanted, TURN: gl.constexpr, FIRST: gl.constexpr, PART: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """The rows of a producer that are added to a tile, columns FIRST on of the tile."""
    _, mail, _, partial_ptr, _, _ = args
    WORD: gl.constexpr = TURN * PER_PRODUCER
    low = read(mail, number, LOW + WORD).to(gl.uint32, bitcast=True).to(gl.int64)
    address = (read(mail, number, HIGH + WORD).to(gl.int64) << 32) | low
    base = read(mail, number, BASE + WORD)
    column = read(mail, number, COLUMN)
    return load_rows(
        partial_ptr + column * FORM.BN,
        address.to(gl.pointer_type(gl.int32), bitcast=True),
        address != 0,
        base,
        row,
        read(mail, number, LIVE),
        wanted & (base >= 0),
        FIRST,
        PART,
        FORM.column_blocks * FORM.BN,
    )


@gluon.jit
def _add_late(part, args, number, bits, row, FIRST: gl.constexpr, FORM: gl.constexpr):
    """Adds the producers that were not fetched, columns FIRST on of the tile.

    The first only if not all were ready, so that the order of the sum is one.
    """
    JOIN: gl.constexpr = FORM.join
    for turn in gl.static_range(JOIN):
        part = _add_producer(part, args, number, bits, row, turn, FIRST, FORM)
    return part


@gluon.jit
def _add_producer(
    part, args, number, bits, row, TURN: gl.constexpr, FIRST: gl.constexpr, FORM: gl.constexpr
):
    _, mail, _, _, work_ptr, _ = args
    WORD: gl.constexpr = TURN * PER_PRODUCER
    ready = (bits & 4) == 4
    missing = read(mail, number, BASE + WORD) >= 0
    if TURN == 0:
        missing = missing & (not ready)
    if missing:
        if not ready:
            counter_ptr = counter_at(work_ptr, read(mail, number, COUNTER + WORD))
            await_flag(counter_ptr, read(mail, number, TARGET + WORD))
        p = _fetch(args, number, row, True, TURN, FIRST, part.shape[1], FORM)
        part = part + p.to(gl.float32)
    return part


@gluon.jit
def _add_bias(part, args, number, bits, FIRST: gl.constexpr, FORM: gl.constexpr):
    _, mail, output, _, _, sizes = args
    COLUMNS: gl.constexpr = part.shape[1]
    L: gl.constexpr = gl.SliceLayout(0, accumulator_layout(COLUMNS))
    if FORM.biased >= 0:  # noqa: SIM102 - known when compiled
        if (bits & 2) == 2:
            n = read(mail, number, COLUMN) * FORM.BN + FIRST + gl.arange(0, COLUMNS, L)
            beyond = (sizes[2] * FORM.unit + 7) // 8 * 8
            bias = gl.load(output[2] + n, mask=n < beyond, other=0.0)
            part = part + bias.to(gl.float32)[None, :]
    return part


@gluon.jit
def _operands(ring, step, C: gl.constexpr, FORM: gl.constexpr):
    """Own rows of x, and W, of a step of the ring, when they are there."""
    x_bufs, w_bufs, full, _ = ring
    s = step % FORM.stages
    mbarrier.wait(full.index(s), (step // FORM.stages) & 1)
    return x_bufs.index(s * 2 + C), w_bufs.index(s)


@gluon.jit
def _give_back(ring, step, wanted, FORM: gl.constexpr):
    mbarrier.arrive(ring[3].index(step % FORM.stages), pred=wanted)


@gluon.jit
def _begin(ring, step, held, C: gl.constexpr, FORM: gl.constexpr):
    """Starts the product of a tile: its first step, from step `step` of the ring on."""
    BN: gl.constexpr = FORM.BN
    acc = gl.zeros((64, BN), gl.float32, accumulator_layout(BN))
    x, w = _operands(ring, step, C, FORM)
    # Nothing has to be zeroed.
    acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True, use_acc=False)
    # Meanwhile the copy engine has read the output of the tile before. Without a branch between
    # them, here that of a wait that is over, ptxas moves the wait for it before the product.
    if FORM.branch:
        mbarrier.wait(ring[2].index(step % FORM.stages), (step // FORM.stages) & 1)
    tma.store_wait(0)
    if FORM.keep and FORM.BN == 256 and FORM.result >= 0 and FORM.described:
        _give_back(ring, step + FORM.stages - 2, held == 1, FORM)
        _give_back(ring, step + FORM.stages - 1, held == 1, FORM)
    return acc


@gluon.jit
def _continue(acc, ring, step, steps, hold, C: gl.constexpr, FORM: gl.constexpr):
    """Starts the other steps, one at least; the last are still running.

    A product runs while the operands of the next are waited for; its stage is given back when it is
    complete. With `hold` the last two are not: their x slots will stage the output.
    """
    last = steps - 1
    if FORM.outstanding == 0:
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=0, deps=(acc,)))
        _give_back(ring, step, (hold == 0) | (last > 1), FORM)
    for k in range(1, last):
        x, w = _operands(ring, step + k, C, FORM)
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=FORM.outstanding, deps=(acc,)))
        if FORM.outstanding == 0:
            _give_back(ring, step + k, (hold == 0) | (k < last - 1), FORM)
        else:
            _give_back(ring, step + k - 1, True, FORM)
    x, w = _operands(ring, step + last, C, FORM)
    return _tail(x, w, acc, FORM.k_tail)


@gluon.jit
def _complete(acc, ring, step, steps, hold, FORM: gl.constexpr):
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if hold == 0:
        if FORM.outstanding == 1:
            _give_back(ring, step + steps - 2, True, FORM)
        _give_back(ring, step + steps - 1, True, FORM)
    return acc


@gluon.jit
def _tail(x, w, acc, K: gl.constexpr):
    """The last step, of whose columns only the first K are not padding."""
    if K == 64:
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
    else:
        if K >= 32:
            acc = _slice(x, w, acc, 0, 32)
        if K == 48:
            acc = _slice(x, w, acc, 32, 16)
        if K == 16:
            acc = _slice(x, w, acc, 0, 16)
    return acc


@gluon.jit
def _slice(x, w, acc, FIRST: gl.constexpr, K: gl.constexpr):
    x, w = x.slice(FIRST, K, dim=1), w.slice(FIRST, K, dim=1)
    return warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
