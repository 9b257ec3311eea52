"""The loading warp: takes tickets, loads operands, tells the consumers what they get."""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ikbo_tree.kernels.common.gluon_lib import claim, load_acquire, ticket, tma_load
from ikbo_tree.kernels.linear.gluon_config import BK
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
    OWN,
    PER_PRODUCER,
    ROW,
    STEPS,
    TARGET,
    send,
    write,
)
from ikbo_tree.kernels.linear.gluon_schedule import place

_BK = gl.constexpr(BK)

LINE = gl.constexpr(32)
"""Words from counter to counter: a line of memory each."""


@gluon.jit
def counter_at(work_ptr, level):
    """The counter of finished tiles of a level, behind the tickets' and the leavers'."""
    return work_ptr + (2 + level) * LINE


@gluon.jit
def produce(operands, ring, mail, tree, work_ptr, FORM: gl.constexpr):
    """Loads all tiles of this program, and the message of each during the tile before.

    A ticket is asked for in the middle of a tile and looked at one step before its end, so that
    nothing waits for the counter; and not at its beginning, where a program that starts early would
    take two tiles before another had one.

    Args:
        operands: x and W of each level, None for those that there are not.
        ring: `x_bufs`, `w_bufs`, `full`, `empty`.
        mail: see `gluon_mail`.
        tree: (live rows of each level), (steps of each level), (first row among all partial results
            of each level), (maps of the edges), (rows of their producers among all partial
            results).
        work_ptr: tickets and counters, a line each.
        FORM: `gluon_config.Form`.
    """
    lives, steps_of, _, _, _ = tree
    number = 0
    at = _place(ticket(claim(work_ptr)), lives, FORM)
    level, row, column = at
    # Loads of the first tile start before its message, whose making takes a while.
    fed = gl.where(level >= 0, 2, 0)
    step = _feed(operands, ring, at, gl.to_tensor(0), 0, fed, FORM)
    sure = _tell(mail, 0, at, gl.to_tensor(-1), tree, work_ptr, FORM)
    while level >= 0:
        steps = _pick(level, steps_of, FORM)
        middle, last = gl.maximum(steps // 2, fed), gl.maximum(steps - 1, fed)
        tile = (level, row, column)
        step = _feed(operands, ring, tile, step, fed, middle, FORM)
        claimed = claim(work_ptr)
        step = _feed(operands, ring, tile, step, middle, last, FORM)
        following = _place(ticket(claimed), lives, FORM)
        step = _feed(operands, ring, tile, step, last, steps, FORM)
        number += 1
        sure = _tell(mail, number, following, sure, tree, work_ptr, FORM)
        level, row, column = following
        fed = gl.to_tensor(0)


@gluon.jit
def _place(number, lives, FORM: gl.constexpr):
    return place(number, lives[0], lives[1], lives[2], lives[3], FORM.column_blocks)


@gluon.jit
def _pick(level, values, FORM: gl.constexpr):
    """`values[level]` for a level known at run time."""
    LEVELS: gl.constexpr = FORM.levels
    found = values[0]
    for i in gl.static_range(1, LEVELS):
        found = gl.where(level == i, values[i], found)
    return found


@gluon.jit
def _tell(mail, number, at, sure, tree, work_ptr, FORM: gl.constexpr):
    """Sends the message of a tile. Returns the level whose producers are known to be finished.

    `sure` is what the message before has found: tiles of one level follow each other, and to look
    again would cost time and what the cache holds.
    """
    level, row, column = at
    lives, steps_of, own, indexes, bases = tree
    ready = gl.to_tensor(FORM.ahead)
    JOIN: gl.constexpr = FORM.join
    for turn in gl.static_range(JOIN):
        ready = ready & _tell_producer(
            mail, number, level, sure, turn, lives, indexes, bases, work_ptr, FORM
        )
    bits = (level == FORM.result).to(gl.int32) + (level == FORM.biased).to(gl.int32) * 2
    bits = gl.where(level < 0, END, bits + ready.to(gl.int32) * 4)
    write(mail, number, BITS, bits)
    write(mail, number, STEPS, _pick(level, steps_of, FORM))
    write(mail, number, ROW, row)
    write(mail, number, COLUMN, column)
    write(mail, number, LIVE, _pick(level, lives, FORM))
    write(mail, number, OWN, _pick(level, own, FORM))
    write(mail, number, LEVEL, level)
    send(mail, number)
    return gl.where(ready, level, sure)


@gluon.jit
def _tell_producer(
    mail, number, level, sure, turn: gl.constexpr, lives, indexes, bases, work_ptr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Writes about the producer that a level has at that turn; returns whether it can be read.

    That is acquired here and handed on by the message's barrier, so that the consumers may read at
    once.
    """
    address = gl.to_tensor(0).to(gl.int64)
    base = gl.to_tensor(-1)
    counter, target = gl.to_tensor(0), gl.to_tensor(0)
    EDGES: gl.constexpr = len(FORM.edges)
    for edge in gl.static_range(EDGES):
        if FORM.edges[edge][1] == turn:
            mine = level == FORM.edges[edge][0]
            base = gl.where(mine, bases[edge], base)
            if indexes[edge] is not None:
                address = gl.where(mine, indexes[edge].to(gl.int64), address)
            if FORM.edges[edge][2] >= 0:
                counter = gl.where(mine, FORM.edges[edge][2], counter)
                blocks = (lives[FORM.edges[edge][2]] + 63) // 64 * FORM.column_blocks
                target = gl.where(mine, blocks, target)
    first: gl.constexpr = turn * PER_PRODUCER
    write(mail, number, LOW + first, address.to(gl.int32))
    write(mail, number, HIGH + first, (address >> 32).to(gl.int32))
    write(mail, number, BASE + first, base)
    write(mail, number, COUNTER + first, counter)
    write(mail, number, TARGET + first, target)
    seen = target
    if FORM.ahead:  # noqa: SIM102 - known when compiled
        if (target > 0) & (level != sure):
            seen = load_acquire(counter_at(work_ptr, counter))
    return seen >= target


@gluon.jit
def _feed(operands, ring, tile, step, first, end, FORM: gl.constexpr):
    """Loads a tile's operands for steps `first` to `end` into the ring, from its step `step` on.

    What lies beyond the rows, N or K is zero: the copy engine clips at the sizes of its
    descriptors. Rows that exist and are dead are loaded as they are; rows do not meet.
    """
    x_bufs, w_bufs, full, empty = ring
    level, row, column = tile
    BN: gl.constexpr = FORM.BN
    S: gl.constexpr = FORM.stages
    LEVELS: gl.constexpr = FORM.levels
    for k in range(first, end):
        s = step % S
        bar = full.index(s)
        # Both consumers have multiplied what the stage held, and have stored what they kept there.
        mbarrier.wait(empty.index(s), ((step // S) & 1) ^ 1)
        mbarrier.expect(bar, (128 + BN) * _BK * 2)
        for i in gl.static_range(LEVELS):
            if level == i:
                x, w = operands[2 * i], operands[2 * i + 1]
                tma_load(x, [row, k * _BK], bar, x_bufs.index(s * 2))
                tma_load(x, [row + 64, k * _BK], bar, x_bufs.index(s * 2 + 1))
                tma_load(w, [column * BN, k * _BK], bar, w_bufs.index(s))
        step += 1
    return step
