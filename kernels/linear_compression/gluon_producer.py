"""The loading warp: takes tickets, loads operands, tells the consumers what they get."""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.common.gluon_lib import claim, load_acquire, ticket, tma_load
from ikbo_tree.kernels.linear_compression.gluon_config import BK
from ikbo_tree.kernels.linear_compression.gluon_mail import END, send
from ikbo_tree.kernels.linear_compression.gluon_schedule import place

_BK = gl.constexpr(BK)


@gluon.jit
def produce(operands, ring, mail, tree, work, FORM: gl.constexpr):
    """Loads all tiles of this program, and the message of each during the tile before.

    A ticket is asked for in the middle of a tile and looked at one step before its end, so that
    nothing waits for the counter; and not at its beginning, where a program that starts early would
    take two tiles before another had one.

    Args:
        operands: W and E of each level, None for those that there are not.
        ring: `w_bufs`, `e_bufs`, `full`, `empty`.
        mail: see `gluon_mail`.
        tree: (live rows of each level, late), (steps of each level), (first row among all partial
            results of each level), (maps of the edges), (rows of their producers among all
            partial results).
        work: pointers to the counter and to the flags.
        FORM: `gluon_form.Form`.
    """
    counter_ptr, flags_ptr = work
    lives, steps_of, own, indexes, bases = tree
    number = 0
    at = _place(ticket(claim(counter_ptr)), lives, FORM)
    level, row, column, block, pair = at
    # Loads of the first tile start before its message, whose making takes a while.
    fed = gl.where(level >= 0, 2, 0)
    step = _feed(operands, ring, at, gl.to_tensor(0), 0, fed, FORM)
    parents = _parents(at, indexes, bases, FORM)
    send(mail, 0, _message(at, parents, steps_of, own, flags_ptr, FORM))
    while level >= 0:
        steps = _pick(level, steps_of, FORM)
        middle, last = gl.maximum(steps // 2, fed), gl.maximum(steps - 1, fed)
        tile = (level, row, column, block, pair)
        step = _feed(operands, ring, tile, step, fed, middle, FORM)
        claimed = claim(counter_ptr)
        step = _feed(operands, ring, tile, step, middle, last, FORM)
        following = _place(ticket(claimed), lives, FORM)
        parents = _parents(following, indexes, bases, FORM)
        step = _feed(operands, ring, tile, step, last, steps, FORM)
        number += 1
        send(mail, number, _message(following, parents, steps_of, own, flags_ptr, FORM))
        level, row, column, block, pair = following
        fed = gl.to_tensor(0)


@gluon.jit
def _place(number, lives, FORM: gl.constexpr):
    return place(
        number,
        lives[0],
        lives[1],
        lives[2],
        lives[3],
        lives[4],
        FORM.result,
        FORM.row_blocks,
        FORM.column_blocks,
    )


@gluon.jit
def _pick(level, values, FORM: gl.constexpr):
    """`values[level]` for a level known at run time."""
    LEVELS: gl.constexpr = FORM.levels
    found = values[0]
    for i in gl.static_range(1, LEVELS):
        found = gl.where(level == i, values[i], found)
    return found


@gluon.jit
def _parents(at, indexes, bases, FORM: gl.constexpr):
    """Rows of what is added to a tile among all partial results; -1: none."""
    level, row, _, _, _ = at
    found = ()
    EDGES: gl.constexpr = len(FORM.edges)
    for turn in gl.static_range(3):
        parent = gl.to_tensor(-1)
        for edge in gl.static_range(EDGES):
            if FORM.edges[edge][1] == turn:
                mine = level == FORM.edges[edge][0]
                if indexes[edge] is None:
                    at_producer = row
                else:
                    at_producer = gl.load(indexes[edge] + row, mask=mine, other=0)
                parent = gl.where(mine, at_producer + bases[edge], parent)
        found = found + (parent,)  # noqa: RUF005 - Triton has no unpacking
    return found


@gluon.jit
def _message(at, parents, steps_of, own, flags_ptr, FORM: gl.constexpr):
    level, row, column, block, pair = at
    last = level == FORM.result
    bits = last.to(gl.int32) + pair * 2
    if FORM.ahead and FORM.join > 0:
        bits += _is_up(flags_ptr, parents[0], column, block, pair, FORM).to(gl.int32) * 4
    bits = gl.where(level < 0, END, bits)
    steps = _pick(level, steps_of, FORM)
    row = gl.where(last, row, row + _pick(level, own, FORM))
    return bits, steps, row, block, column, parents[0], parents[1], parents[2]


@gluon.jit
def _is_up(flags_ptr, parent, column, block, pair, FORM: gl.constexpr):
    """Whether all that a tile adds first is there.

    Acquired here and handed on by the message's barrier, so that the consumers may read at once.
    """
    seen = gl.to_tensor(0)
    if parent >= 0:
        flag_ptr = flag_at(flags_ptr, parent, column, block, FORM)
        seen = load_acquire(flag_ptr)
        if pair == 1:
            seen = gl.minimum(seen, load_acquire(flag_ptr + 1))
    return seen >= 2


@gluon.jit
def flag_at(flags_ptr, row, column, block, FORM: gl.constexpr):
    """The flag of a row block of a partial result, which counts to 2."""
    at = row.to(gl.int64) * FORM.column_blocks + column
    return flags_ptr + at * FORM.row_blocks + block


@gluon.jit
def _feed(operands, ring, tile, step, first, end, FORM: gl.constexpr):
    """Loads a tile's operands for steps `first` to `end` into the ring, from its step `step` on.

    A pair needs two row blocks of W, a single one. What lies beyond M, N or K is zero, never a
    neighbour's: the copy engine clips at the sizes of its descriptors.
    """
    w_bufs, e_bufs, full, empty = ring
    level, row, column, block, pair = tile
    BN: gl.constexpr = FORM.BN
    S: gl.constexpr = FORM.stages
    LEVELS: gl.constexpr = FORM.levels
    for k in range(first, end):
        s = step % S
        bar = full.index(s)
        # Both consumers have multiplied what the stage held, and have stored what they kept there.
        mbarrier.wait(empty.index(s), ((step // S) & 1) ^ 1)
        mbarrier.expect(bar, (64 + BN) * _BK * 2, pred=pair == 0)
        mbarrier.expect(bar, (128 + BN) * _BK * 2, pred=pair == 1)
        for i in gl.static_range(LEVELS):
            if level == i:
                w, e = operands[2 * i], operands[2 * i + 1]
                tma_load(w, [block * 64, k * _BK], bar, w_bufs.index(s * 2))
                tma_load(
                    w, [block * 64 + 64, k * _BK], bar, w_bufs.index(s * 2 + 1), pred=pair == 1
                )
                tma_load(e, [row, k * _BK, column * BN], bar, e_bufs.index(s))
        step += 1
    return step
