"""The two warpgroups that multiply: products, partial results, output."""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ikbo_tree.kernels.common.gluon_fragments import (
    accumulator_layout,
    halves,
    load_fragment,
    store_fragment,
)
from ikbo_tree.kernels.common.gluon_lib import await_flag, cta_sync, first_lane, tma_store
from ikbo_tree.kernels.linear_compression.gluon_config import BK
from ikbo_tree.kernels.linear_compression.gluon_mail import END, receive
from ikbo_tree.kernels.linear_compression.gluon_producer import flag_at

_BK = gl.constexpr(BK)


@gluon.jit
def consume(
    C: gl.constexpr, ring, mail, output, partial_ptr, flags_ptr, sizes, FORM: gl.constexpr
):  # fmt: skip
    """Multiplies its share of every tile of this program.

    Of a pair, consumer C has row block C and all columns; of a single, half C of the columns. Both
    read the same stage of E, at their own pace.

    Args:
        C: 0 or 1.
        ring: `w_bufs`, `e_bufs`, `full`, `empty`.
        mail: see `gluon_mail`.
        output: descriptor of the result and, for each consumer, two pieces of it in shared memory;
            None where it is not in this launch.
        partial_ptr: the partial results, in fragment order.
        flags_ptr: a flag for each of their row blocks.
        sizes: M, allocated and live rows of the result.
        FORM: `gluon_form.Form`.
    """
    M, rows, live = sizes
    out, staging = output
    BN: gl.constexpr = FORM.BN
    args = (ring, mail, staging, out, partial_ptr, flags_ptr, M)
    step = 0
    held = 0  # the tile before has kept the W slots of its last two stages
    number = 0
    bits, steps, row, block, column, parent_0, parent_1, parent_2 = receive(mail, 0)
    while bits != END:
        message = (bits, steps, row, block, column, parent_0, parent_1, parent_2)
        state = (step, held, number)
        if FORM.row_blocks == 1:
            held, following = _tile(C, args, message, state, BN // 2, FORM)
        elif FORM.row_blocks % 2 == 0:
            held, following = _tile(C, args, message, state, BN, FORM)
        else:
            if (bits & 2) == 2:
                held, following = _tile(C, args, message, state, BN, FORM)
            else:
                # Where both branches computed the same addresses, ptxas 12.8 left a part of the
                # descriptors out of this one, which then multiplied whatever lay elsewhere.
                state = (first_lane(step), held, number)
                held, following = _tile(C, args, message, state, BN // 2, FORM)
        step += steps
        number += 1
        bits, steps, row, block, column, parent_0, parent_1, parent_2 = following
    if FORM.result >= 0:
        _zero_dead_rows(C, staging, out, rows, live, FORM)


@gluon.jit
def _tile(C: gl.constexpr, args, message, state, COLUMNS: gl.constexpr, FORM: gl.constexpr):
    """[64, COLUMNS] of a tile. Returns whether it keeps its last two stages, and the next message.

    Partials are added after the product, in float32 and in one order, whether they were there
    before it or not: when a flag goes up never shows in the bits of a result.
    """
    ring, mail, staging, _, partial_ptr, flags_ptr, M = args
    step, held, number = state
    bits, steps, row, block, column, _, _, _ = message
    BN: gl.constexpr = FORM.BN
    WHOLE: gl.constexpr = COLUMNS == BN
    PARTS: gl.constexpr = 2 if COLUMNS == 256 else 1
    PART: gl.constexpr = COLUMNS // PARTS
    FIRST: gl.constexpr = 0 if WHOLE else C * COLUMNS  # column of the tile
    SLOT: gl.constexpr = C if WHOLE else 0
    FETCHED: gl.constexpr = min(FORM.prefetch, PARTS) if FORM.join > 0 else 0
    KEEP: gl.constexpr = PARTS == 2 and FORM.keep and FORM.result >= 0
    block += SLOT
    m = block * 64
    result = (bits & 1) == 1
    hold = result.to(gl.int32) if KEEP else 0
    early = (bits & 4) == 4
    at = _partial_at(partial_ptr, message[5], column, m, M, FORM)
    if not FORM.behind:
        p_0, p_1 = _fetch(at, early, M - m, FETCHED, PART, FIRST, FORM)
    acc = _begin(ring, step, held, SLOT, FIRST, COLUMNS, FORM)
    if FORM.behind:
        p_0, p_1 = _fetch(at, early, M - m, FETCHED, PART, FIRST, FORM)
    acc = _continue(acc, ring, step, steps, hold, SLOT, FIRST, COLUMNS, FORM)
    following = receive(mail, number + 1)
    acc = _complete(acc, ring, step, steps, hold, FORM)
    place = (row, m, column)
    if FORM.result < 0:
        s_0, s_1 = None, None
    else:
        s_0, s_1 = staging.index(2 * C), staging.index(2 * C + 1)
    if PARTS == 1:
        if FETCHED > 0:
            acc = acc + p_0.to(gl.float32)
        acc = _add_late(acc, args, message, block, FETCHED > 0, FIRST, FORM)
        _emit(args, acc, s_0, s_1, place, result, FIRST, FORM)
    else:
        left, right = halves(acc, COLUMNS)
        if FETCHED > 0:
            left = left + p_0.to(gl.float32)
        left = _add_late(left, args, message, block, FETCHED > 0, 0, FORM)
        _emit(args, left, s_0, s_1, place, result, 0, FORM)
        if FETCHED == 2:
            right = right + p_1.to(gl.float32)
        right = _add_late(right, args, message, block, FETCHED == 2, PART, FORM)
        if KEEP:
            # Its own W slots of the last two stages: its products are complete, nobody else reads
            # them, and they are laid out as pieces of the output are.
            w_bufs = ring[0]
            s_0 = w_bufs.index((step + steps - 2) % FORM.stages * 2 + C).reshape([1, 64, 64])
            s_1 = w_bufs.index((step + steps - 1) % FORM.stages * 2 + C).reshape([1, 64, 64])
        elif FORM.result >= 0:
            tma.store_wait(0)
            cta_sync()
        _emit(args, right, s_0, s_1, place, result, PART, FORM)
    if FORM.result != 0:  # noqa: SIM102 - known when compiled
        if not result:
            # All threads of this consumer have stored their part; the release covers them.
            cta_sync()
            flag_ptr = flag_at(flags_ptr, row, column, block, FORM)
            gl.atomic_add(flag_ptr, 2 if WHOLE else 1, sem="release", scope="gpu")
    return hold, following


@gluon.jit
def _partial_at(partial_ptr, parent, column, m, M, FORM: gl.constexpr):
    """Pointer to the tile [64, BN] of a partial result: [rows, column blocks, M in 16s, BN]."""
    at = (parent.to(gl.int64) * FORM.column_blocks + column) * ((M + 15) // 16 * 16) + m
    return partial_ptr + at * FORM.BN


@gluon.jit
def _fetch(
    at, wanted, rows, FETCHED: gl.constexpr, PART: gl.constexpr, FIRST: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """The first FETCHED parts of the partial that a tile adds first, on their way."""
    p_0, p_1 = 0, 0
    if FETCHED > 0:
        p_0 = load_fragment(at, wanted, rows, PART, FIRST, FORM.BN)
    if FETCHED == 2:
        p_1 = load_fragment(at, wanted, rows, PART, FIRST + PART, FORM.BN)
    return p_0, p_1


@gluon.jit
def _operands(
    ring, step, SLOT: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr, FORM: gl.constexpr
):
    """W and E of a step of the ring, when they are there."""
    w_bufs, e_bufs, full, _ = ring
    s = step % FORM.stages
    mbarrier.wait(full.index(s), (step // FORM.stages) & 1)
    e = e_bufs.index(s).reshape([_BK, FORM.BN]).slice(FIRST, COLUMNS, dim=1)
    return w_bufs.index(s * 2 + SLOT), e


@gluon.jit
def _give_back(ring, step, wanted, FORM: gl.constexpr):
    mbarrier.arrive(ring[3].index(step % FORM.stages), pred=wanted)


@gluon.jit
def _begin(
    ring, step, held, SLOT: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Starts the product of a tile: its first step, from step `step` of the ring on."""
    acc = gl.zeros((64, COLUMNS), gl.float32, accumulator_layout(COLUMNS))
    w, e = _operands(ring, step, SLOT, FIRST, COLUMNS, FORM)
    acc = warpgroup_mma(w, e, acc, is_async=True, use_acc=False)  # so nothing has to be zeroed
    # Meanwhile the copy engine has read the output of the tile before. Without a branch between
    # them, here that of a wait that is over, ptxas moves the wait for it before the product.
    if FORM.branch:
        mbarrier.wait(ring[2].index(step % FORM.stages), (step // FORM.stages) & 1)
    tma.store_wait(0)
    if FORM.keep and FORM.BN == 256 and FORM.result >= 0:
        _give_back(ring, step + FORM.stages - 2, held == 1, FORM)
        _give_back(ring, step + FORM.stages - 1, held == 1, FORM)
    return acc


@gluon.jit
def _continue(
    acc, ring, step, steps, hold, SLOT: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Starts the other steps, one at least; the last are still running.

    A product runs while the operands of the next are waited for; its stage is given back when it is
    complete. With `hold` the last two are not: their W slots will stage the output.
    """
    last = steps - 1
    if FORM.outstanding == 0:
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=0, deps=(acc,)))
        _give_back(ring, step, (hold == 0) | (last > 1), FORM)
    for k in range(1, last):
        w, e = _operands(ring, step + k, SLOT, FIRST, COLUMNS, FORM)
        acc = warpgroup_mma(w, e, acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=FORM.outstanding, deps=(acc,)))
        if FORM.outstanding == 0:
            _give_back(ring, step + k, (hold == 0) | (k < last - 1), FORM)
        else:
            _give_back(ring, step + k - 1, True, FORM)
    w, e = _operands(ring, step + last, SLOT, FIRST, COLUMNS, FORM)
    return _tail(w, e, acc, FORM.k_tail)


@gluon.jit
def _complete(acc, ring, step, steps, hold, FORM: gl.constexpr):
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if hold == 0:
        if FORM.outstanding == 1:
            _give_back(ring, step + steps - 2, True, FORM)
        _give_back(ring, step + steps - 1, True, FORM)
    return acc


@gluon.jit
def _tail(w, e, acc, K: gl.constexpr):
    """The last step, of whose columns only the first K are not padding."""
    if K == 64:
        acc = warpgroup_mma(w, e, acc, is_async=True)
    else:
        if K >= 32:
            acc = warpgroup_mma(w.slice(0, 32, dim=1), e.slice(0, 32, dim=0), acc, is_async=True)
        if K == 48:
            acc = warpgroup_mma(w.slice(32, 16, dim=1), e.slice(32, 16, dim=0), acc, is_async=True)
        if K == 16:
            acc = warpgroup_mma(w.slice(0, 16, dim=1), e.slice(0, 16, dim=0), acc, is_async=True)
    return acc


@gluon.jit
def _add_late(
    part, args, message, block, FETCHED: gl.constexpr, FIRST: gl.constexpr, FORM: gl.constexpr
):
    """Adds the partials that were not fetched before the product, columns FIRST on of the tile.

    Those of the first producer, if its flag was not up, or unless FETCHED in any case; then those
    of the others.
    """
    _, _, _, _, partial_ptr, flags_ptr, M = args
    column = message[4]
    m = block * 64
    JOIN: gl.constexpr = FORM.join
    for turn in gl.static_range(JOIN):
        parent = message[5 + turn]
        missing = parent >= 0
        if turn == 0 and FETCHED:
            missing = missing & ((message[0] & 4) == 0)
        if missing:
            await_flag(flag_at(flags_ptr, parent, column, block, FORM), 2)
            at = _partial_at(partial_ptr, parent, column, m, M, FORM)
            p = load_fragment(at, True, M - m, part.shape[1], FIRST, FORM.BN)
            part = part + p.to(gl.float32)
    return part


@gluon.jit
def _emit(args, part, first, second, place, result, FIRST: gl.constexpr, FORM: gl.constexpr):
    """Stores a part of a tile, columns FIRST on: as output through staging, or as a partial."""
    out = args[3]
    row, m, column = place
    if FORM.result == 0:
        _store(out, part, first, second, (row, m, column * FORM.BN + FIRST))
    elif FORM.result < 0:
        _keep(args, part, place, FIRST, FORM)
    else:
        if result:
            _store(out, part, first, second, (row, m, column * FORM.BN + FIRST))
        else:
            _keep(args, part, place, FIRST, FORM)


@gluon.jit
def _keep(args, part, place, FIRST: gl.constexpr, FORM: gl.constexpr):
    _, _, _, _, partial_ptr, _, M = args
    row, m, column = place
    at = _partial_at(partial_ptr, row, column, m, M, FORM)
    store_fragment(at, part, M - m, part.shape[1], FIRST, FORM.BN)


@gluon.jit
def _store(out, part, first, second, place):
    row, m, n = place
    PART: gl.constexpr = part.shape[1]
    PIECE: gl.constexpr = out.block_type.shape[2]
    part = part.to(out.dtype)
    if PART == PIECE:
        first.reshape([64, PIECE]).store(part)
    else:
        left, right = halves(part, PART)
        first.reshape([64, PIECE]).store(left)
        second.reshape([64, PIECE]).store(right)
    fence_async_shared()  # the copy engine sees the stores
    tma_store(out, [row, m, n], first)
    if PART > PIECE:
        tma_store(out, [row, m, n + PIECE], second)


@gluon.jit
def _zero_dead_rows(C: gl.constexpr, staging, out, rows, live, FORM: gl.constexpr):
    """Zeros to the rows of the result beyond the live ones, dealt out evenly."""
    PIECE: gl.constexpr = out.block_type.shape[2]
    tma.store_wait(0)
    zeros = staging.index(2 * C)
    cta_sync()
    L: gl.constexpr = accumulator_layout(PIECE)
    zeros.reshape([64, PIECE]).store(gl.zeros((64, PIECE), gl.float32, L).to(out.dtype))
    fence_async_shared()
    tiles = (rows - live) * FORM.row_blocks
    for i in range(gl.program_id(0) * 2 + C, tiles, gl.num_programs(0) * 2):
        row = live + i // FORM.row_blocks
        m = i % FORM.row_blocks * 64
        for n in range(0, FORM.column_blocks * FORM.BN, PIECE):
            tma_store(out, [row, m, n], zeros)
    tma.store_wait(0)  # shared memory must outlive the reads
