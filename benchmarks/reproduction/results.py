"""Values of results files of one device, by cell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reproduction import counted
from reproduction.spec import Cell, Claim, Intensity, Panel, Value

SHARE = 0.9
"""Of the article's gain, for a claim to hold."""


@dataclass(frozen=True)
class Results:
    """Results files of a device.

    Attributes:
        folder: where they are.
        device: as file names end.
    """

    folder: Path
    device: str
    _read: dict[str, dict[str, Any] | None] = field(default_factory=dict, repr=False, compare=False)

    def path(self, topic: str) -> Path:
        """Of a file, whether it is there or not."""
        return self.folder / f"{topic}_{self.device}.json"

    def file(self, topic: str) -> dict[str, Any] | None:
        """Its content as this object first saw it, or None."""
        if topic not in self._read:
            self._read[topic] = self._load(topic)
        return self._read[topic]

    def _load(self, topic: str) -> dict[str, Any] | None:
        path = self.path(topic)
        if not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text())
        for record in content["records"]:
            if record.get("elements"):
                record["percent"] = 100 * record["differing"] / record["elements"]
        return content

    def found(self, cell: Cell) -> float | None:
        """The cell's number, or None."""
        return next(iter(self._numbers(cell)), None)

    def _numbers(self, cell: Cell) -> Iterator[float]:
        content = self.file(cell.topic)
        for record in content["records"] if content else ():
            named = record["workload"] == cell.workload and record.get("who") == cell.who
            named = named and cell.direction in (None, record.get("direction"))
            named = named and cell.dtype in (None, record.get("dtype"))
            if named and record.get(cell.field) is not None:
                yield float(record[cell.field])

    def first(self, topics: Sequence[str], cell: Cell) -> tuple[float, str] | None:
        """The cell's number in the first of some files that has it, and that file's topic."""
        for topic in topics:
            value = self.found(
                Cell(topic, cell.workload, cell.who, cell.direction, cell.field, cell.dtype)
            )
            if value is not None:
                return value, topic
        return None

    def value(self, value: Value | None) -> float | None:
        """Of a cell, or counted; 1 of nothing."""
        if value is None:
            return 1.0
        if isinstance(value, Intensity):
            return counted.cost(value.workload, value.form).intensity
        return self.found(value)

    def measured(self, claim: Claim) -> float | None:
        """The number that decides a claim; None while one of its numbers is missing."""
        numbers = []
        for over, under in claim.ratios:
            a, b = self.value(over), self.value(under)
            if a is None or b is None:
                return None
            numbers.append(a / b if b else float("inf"))
        return min(numbers) if claim.pick == "least" else max(numbers)


def verdict(claim: Claim, value: float | None) -> str:
    """`"holds"`, `"less"` (a gain, but a smaller one), `"no"` or `"missing"`."""
    if value is None:
        return "missing"
    if claim.near is not None:
        return "holds" if abs(value / claim.near - 1) <= 0.05 else "no"
    if claim.at_most is not None:
        return "holds" if value <= claim.at_most else "no"
    if value >= least(claim):
        return "holds"
    return "less" if _is_gain(claim) and value > 1 else "no"


def least(claim: Claim) -> float:
    """What `at_least` asks for."""
    assert claim.at_least is not None
    return 1 + SHARE * (claim.at_least - 1) if _is_gain(claim) else claim.at_least


def _is_gain(claim: Claim) -> bool:
    return claim.unit == "x" and not claim.exactly


def series(results: Results, panel: Panel) -> dict[str, list[tuple[float, str] | None]]:
    """For each contender the number at each point of a panel, and the topic it is from.

    Contenders without a number are left out. With `over` a number is that contender's median
    divided by this one's, both of one file.
    """
    found: dict[str, list[tuple[float, str] | None]] = {}
    for who in panel.who:
        line: list[tuple[float, str] | None] = []
        for _, workload in panel.points:
            cell = Cell("", workload, who, panel.direction, panel.field, panel.dtype)
            number = results.first(panel.topics, cell)
            if number is not None and panel.over is not None:
                base = results.found(
                    Cell(number[1], workload, panel.over, panel.direction, panel.field, panel.dtype)
                )
                number = None if base is None else (base / number[0], number[1])
            line.append(number)
        if any(number is not None for number in line):
            found[who] = line
    return found
