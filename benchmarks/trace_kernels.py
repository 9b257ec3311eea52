"""Clock reads inside Hopper's kernels, put there from outside: the kernels' source stays as it is.

Functions that the consumers of a kernel call are replaced, before it is compiled, by ones that read
the clock and call them. So a traced kernel needs a process in which it was not compiled before.

A log has no counter, which would cost an atomic operation an event: an event lies where its time
says, in a ring of buckets of 8 cycles for each consumer of each program. One thread of a consumer
writes it, in one store that nobody waits for.
"""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.linear_compression import gluon_consumer as compression
from ikbo_tree.kernels.target_attention import gluon_consumer as attention

CONSUMERS = 2
BUCKETS = 2**17
"""Buckets of a consumer: its log holds 2^20 cycles, half a millisecond and more."""
_BUCKET = 3
_KIND = 4
"""Bits: cycles of a bucket; kind of an event, below 28 bits of the clock."""
_WRAP = 2 ** (32 - _KIND)

# Linear compression. A tile begins with BEGIN + (1: of the result) + (2: a pair).
BEGIN, MULTIPLIED, STORED = 1, 5, 6
# Attention: scores of a block are there, a step is done, results are stored.
SCORED, STEPPED, STORING, DONE = 7, 8, 9, 10

_BEGIN, _MULTIPLIED, _STORED = gl.constexpr(BEGIN), gl.constexpr(MULTIPLIED), gl.constexpr(STORED)
_SCORED, _STEPPED = gl.constexpr(SCORED), gl.constexpr(STEPPED)
_STORING, _DONE = gl.constexpr(STORING), gl.constexpr(DONE)

PHASES = {
    (BEGIN, MULTIPLIED): "main loop, single, coarse level",
    (BEGIN + 1, MULTIPLIED): "main loop, single",
    (BEGIN + 2, MULTIPLIED): "main loop, pair, coarse level",
    (BEGIN + 3, MULTIPLIED): "main loop, pair",
    (MULTIPLIED, STORED): "epilogue",
    (STEPPED, SCORED): "scores",
    (SCORED, STEPPED): "softmax",
    (SCORED, SCORED): "first block",
    (SCORED, STORING): "last product",
    (STEPPED, STORING): "last product",
    (STORING, DONE): "store",
}
"""What lies between two events. Whatever else does is waiting for the next tile."""
WAITING = "between tiles"

_LOG = gl.constexpr(0)
"""Where the log lies: a kernel has no argument for it."""

# Few registers live where it is used: of consumers, all are taken.
_MARK = gl.constexpr(f"""{{
.reg .u64 at;
.reg .u32 now;
.reg .pred first;
mov.u32 now, %tid.x;
and.b32 $0, now, 127;
setp.eq.u32 first, $0, 0;
shr.u32 now, now, 7;
mov.u32 $0, %ctaid.x;
mad.lo.u32 now, $0, {CONSUMERS}, now;
mad.wide.u32 at, now, {BUCKETS * 4}, $1;
mov.u32 now, %clock;
bfe.u32 $0, now, {_BUCKET}, {BUCKETS.bit_length() - 1};
mad.wide.u32 at, $0, 4, at;
shl.b32 now, now, {_KIND};
or.b32 now, now, $2;
@first st.global.u32 [at], now;
}}""")


class Event(NamedTuple):
    """Attributes: program: its number; consumer: 0 or 1; clock: cycles; kind: of event."""

    program: int
    consumer: int
    clock: int
    kind: int


class Interval(NamedTuple):
    """Attributes: program and consumer; phase: one of `PHASES`; start, end: cycles."""

    program: int
    consumer: int
    phase: str
    start: int
    end: int


@gluon.jit
def mark(kind):
    """Logs an event, in a consumer."""
    gl.inline_asm_elementwise(
        _MARK,
        "=&r,l,r",
        [gl.to_tensor(_LOG).to(gl.int64), gl.to_tensor(kind)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


_tile, _complete = compression._tile, compression._complete
_peak, _step, _store = attention._peak, attention._step, attention._store


@gluon.jit
def _tile_marked(C: gl.constexpr, args, message, state, COLUMNS: gl.constexpr, FORM: gl.constexpr):
    mark(_BEGIN + (message[0] & 3))
    found = _tile(C, args, message, state, COLUMNS, FORM)
    mark(_STORED)
    return found


@gluon.jit
def _complete_marked(acc, ring, step, steps, hold, FORM: gl.constexpr):
    acc = _complete(acc, ring, step, steps, hold, FORM)
    mark(_MULTIPLIED)
    return acc


@gluon.jit
def _peak_marked(s, scale2, NEGATIVE: gl.constexpr):
    mark(_SCORED)
    return _peak(s, scale2, NEGATIVE)


@gluon.jit
def _step_marked(
    state, q, ring, slot, phase, scale2, low, high, diagonal, MASKED: gl.constexpr,
    D: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    found = _step(state, q, ring, slot, phase, scale2, low, high, diagonal, MASKED, D, NEGATIVE)
    mark(_STEPPED)
    return found


@gluon.jit
def _store_marked(
    q_buf, peak, total, o, row, left, head, space, results, H: gl.constexpr, D: gl.constexpr
):
    mark(_STORING)
    _store(q_buf, peak, total, o, row, left, head, space, results, H, D)
    mark(_DONE)


_MARKED = (
    (compression, "_tile", _tile_marked),
    (compression, "_complete", _complete_marked),
    (attention, "_peak", _peak_marked),
    (attention, "_step", _step_marked),
    (attention, "_store", _store_marked),
)


@contextlib.contextmanager
def traced(programs: int, device: torch.device | str) -> Iterator[Tensor]:
    """Inside, kernels that are compiled for the first time write a log.

    Args:
        programs: of the largest launch.
        device: of the launches.

    Yields:
        The log, [programs, CONSUMERS, BUCKETS] int32. It has the latest launches' events; zero it
        before the one that counts.
    """
    global _LOG
    log = torch.zeros(programs, CONSUMERS, BUCKETS, dtype=torch.int32, device=device)
    # What a kernel was compiled for may not change: there is one log a process.
    assert _LOG.value == 0, "one log a process"
    _LOG = gl.constexpr(log.data_ptr())
    with contextlib.ExitStack() as stack:
        for module, name, marked in _MARKED:
            stack.enter_context(mock.patch.object(module, name, marked))
        yield log


def events(log: Tensor) -> list[Event]:
    """All events of a log by program, consumer and clock, which begins at 0 for each program."""
    at = log.nonzero()
    values = log[tuple(at.T)].tolist()
    firsts: dict[int, int] = {}
    found = []
    for (program, consumer, _), value in zip(at.tolist(), values, strict=True):
        value %= 2**32
        clock = value >> _KIND
        # The clock may have wrapped around: counted from any of the program's events.
        first = firsts.setdefault(program, clock)
        clock = (clock - first + _WRAP // 2) % _WRAP - _WRAP // 2
        found.append(Event(program, consumer, clock, value & (2**_KIND - 1)))
    starts: dict[int, int] = {}
    for event in found:
        starts[event.program] = min(starts.get(event.program, event.clock), event.clock)
    return sorted(e._replace(clock=e.clock - starts[e.program]) for e in found)


def intervals(found: list[Event]) -> list[Interval]:
    """What each consumer did between two of its events, in order."""
    return [
        Interval(*a[:2], PHASES.get((a.kind, b.kind), WAITING), a.clock, b.clock)
        for a, b in itertools.pairwise(found)
        if a[:2] == b[:2]
    ]
