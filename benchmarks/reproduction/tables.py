"""Numbers of panels as tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reproduction import figures
from reproduction.results import Results, series
from reproduction.spec import Panel


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: above it.
        head: of its columns.
        rows: as many cells each.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: Any) -> str:
    """Three digits of a float; anything else as it is."""
    if value is None:
        return ""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return str(value)
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def of_panel(results: Results, panel: Panel) -> list[Table]:
    """Its numbers; of records all fields, a table a workload."""
    if panel.kind == "roofline":
        marks = figures.marks(results)
        head = ["workload", "who", "bytes", "FLOP/B", "TFLOP/s"]
        rows = [[m.workload, m.who, m.source, number(m.intensity), number(m.tflops)] for m in marks]
        return [Table(panel.title, head, rows)] if rows else []
    if panel.kind == "records":
        return _records(results, panel)
    lines = series(results, panel)
    if not lines:
        return []
    head = [panel.xlabel or "", *(str(x).replace("\n", " ") for x, _ in panel.points)]
    if panel.kind == "steps":
        head = ["who", panel.label]
    rows = [[who, *(number(at and at[0]) for at in line)] for who, line in lines.items()]
    return [Table(f"{panel.title}: {panel.label}", head, rows)]


_ABOUT = ("workload", "who", "kernel", "phase", "direction", "dtype")


def _records(results: Results, panel: Panel) -> list[Table]:
    content = results.file(panel.topics[0])
    if content is None:
        return []
    records = content["records"]
    keys = [
        key
        for key in records[0]
        if key not in ("tflops", "gbps", "peak_mb") and any(r.get(key) is not None for r in records)
    ]
    keys.sort(key=lambda key: _ABOUT.index(key) if key in _ABOUT else len(_ABOUT))
    rows = [[number(record.get(key)) for key in keys] for record in records]
    return [Table(panel.title, keys, rows)]
