"""What the intervals of a trace say: how long phases take, and what runs beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trace_kernels import WAITING, Interval

BUSY = ("main loop", "scores", "last product", "first block")
"""Phases in which a consumer has products running, or waits for the other's to end, begin so."""


def summary(found: Sequence[Interval]) -> list[dict[str, Any]]:
    """For each phase how often and how long, and what the other consumer does meanwhile.

    Returns:
        Records of `phase`, `count`, the quantiles `p10`, `median` and `p90` of its cycles, `share`
        of all consumers' time and `beside`, the share of its time in which the program's other
        consumer has products running. The last record's phase is "program": from its first event
        to its last, with the share in which either consumer has products running as `beside`.
    """
    by_program = _programs(found)
    lengths: dict[str, list[int]] = defaultdict(list)
    beside: dict[str, int] = defaultdict(int)
    spans, covered = [], 0
    for mine in by_program.values():
        busy = [_busy([i for i in mine if i.consumer == consumer]) for consumer in (0, 1)]
        for i in mine:
            lengths[i.phase].append(i.end - i.start)
            beside[i.phase] += _overlap(i.start, i.end, busy[1 - i.consumer])
        span = max(i.end for i in mine) - min(i.start for i in mine)
        spans.append(span)
        both = sum(_overlap(int(a), int(b), busy[1]) for a, b in busy[0])
        covered += int(sum((b - a).sum() for a, b in (x.T for x in busy))) - both
    whole = sum(sum(cycles) for cycles in lengths.values())
    records = [
        {
            "phase": phase,
            "count": len(cycles),
            **_quantiles(cycles),
            "share": round(sum(cycles) / whole, 4),
            "beside": round(beside[phase] / max(1, sum(cycles)), 4),
        }
        for phase, cycles in sorted(lengths.items(), key=lambda item: -sum(item[1]))
    ]
    program = {"phase": "program", "count": len(spans), **_quantiles(spans), "share": 1.0}
    return [*records, {**program, "beside": round(covered / max(1, sum(spans)), 4)}]


def _programs(found: Sequence[Interval]) -> dict[int, list[Interval]]:
    by_program: dict[int, list[Interval]] = defaultdict(list)
    for interval in found:
        by_program[interval.program].append(interval)
    return by_program


def _busy(mine: Sequence[Interval]) -> NDArray[np.int64]:
    pairs = [(i.start, i.end) for i in mine if i.phase.startswith(BUSY)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _overlap(start: int, end: int, others: NDArray[np.int64]) -> int:
    """Cycles that an interval shares with others, which do not overlap."""
    common = np.minimum(others[:, 1], end) - np.maximum(others[:, 0], start)
    return int(common.clip(0).sum())


def _quantiles(cycles: Sequence[int]) -> dict[str, int]:
    values = np.quantile(cycles, (0.1, 0.5, 0.9)).round().astype(int).tolist()
    return dict(zip(("p10", "median", "p90"), values, strict=True))


def picture(found: Sequence[Interval], shown: int) -> dict[str, Any]:
    """Part of the trace of one program: that with the median span, from a third of it on.

    Args:
        found: all intervals.
        shown: cycles of the part.

    Returns:
        `program`, and `intervals`: [consumer, phase, start, end] in cycles from the part's start.
    """
    by_program = _programs(found)
    spans = {p: max(i.end for i in mine) for p, mine in by_program.items()}
    program = sorted(spans, key=spans.__getitem__)[len(spans) // 2]
    first = max(0, min(spans[program] // 3, spans[program] - shown))
    rows = [
        [i.consumer, i.phase, max(0, i.start - first), min(shown, i.end - first)]
        for i in by_program[program]
        if i.end > first and i.start < first + shown and i.phase != WAITING
    ]
    return {"program": program, "intervals": rows}
