"""What an item of the reproduction is: data that figures, tables and verdicts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

X: TypeAlias = float | str


@dataclass(frozen=True)
class Cell:
    """One number of a results file.

    Attributes:
        topic: begins the file's name; the device ends it.
        workload: of the record.
        who: of the record.
        direction: of the record; None: any.
        field: of the record.
        dtype: of the record; None: any.
    """

    topic: str
    workload: str
    who: str
    direction: str | None = "fwd"
    field: str = "median_ms"
    dtype: str | None = None


@dataclass(frozen=True)
class Intensity:
    """Operations a byte, counted.

    Attributes:
        workload: of linear compression or attention.
        form: `"tree"`; `"flat"`: copies made, then the op; `"op"`: the flat op alone.
    """

    workload: str
    form: Literal["tree", "flat", "op"]


Value: TypeAlias = Cell | Intensity
Ratio: TypeAlias = tuple[Value, Value | None]
"""Two numbers to divide; None: the first as it is."""


@dataclass(frozen=True)
class Claim:
    """A sentence with a number, and what decides whether it holds.

    Attributes:
        text: what is claimed.
        article: the article's figure in words; empty: the article has none.
        ratios: numbers measured here.
        pick: which of them counts.
        at_least: it holds at nine tenths of the gain over 1, or at this value where it is no ratio.
        at_most: it holds below this.
        near: it holds within 5 % of this.
        exactly: take `at_least` as it is.
        unit: behind the number.
    """

    text: str
    article: str
    ratios: Sequence[Ratio]
    pick: Literal["least", "most"] = "least"
    at_least: float | None = None
    at_most: float | None = None
    near: float | None = None
    exactly: bool = False
    unit: str = "x"


@dataclass(frozen=True)
class Panel:
    """One plot, and the table of its numbers.

    Attributes:
        title: above it.
        kind: `"lines"` over numbers; `"bars"`, groups of them; `"steps"`, a bar a contender;
            `"roofline"`; `"records"`, a table of all fields and no plot.
        topics: results files, the first one that has a record counts.
        points: what stands on the x axis, and the workload there.
        who: contenders in order.
        direction: of records; None: any.
        dtype: of records; None: any.
        field: of records.
        label: of the values' axis, with the unit.
        xlabel: of the other one.
        over: values are this contender's median over the others'.
        log: the x axis of lines is logarithmic.
    """

    title: str
    kind: Literal["lines", "bars", "steps", "roofline", "records"]
    topics: Sequence[str]
    points: Sequence[tuple[X, str]]
    who: Sequence[str] = ()
    direction: str | None = "fwd"
    dtype: str | None = None
    field: str = "median_ms"
    label: str = "time, ms"
    xlabel: str = ""
    over: str | None = None
    log: bool = False


@dataclass(frozen=True)
class Item:
    """A table or figure of the article, or a measurement that goes further.

    Attributes:
        id: for `--only`, and names of plots.
        part: `"article"` or `"beyond"`.
        title: of its section.
        article: what the article shows.
        here: what is measured here, and how it differs.
        panels: its plots and tables.
        claims: what can hold or not.
    """

    id: str
    part: Literal["article", "beyond"]
    title: str
    article: str
    here: str
    panels: Sequence[Panel]
    claims: Sequence[Claim] = ()

    @property
    def topics(self) -> tuple[str, ...]:
        """Results files that it takes numbers from, in order."""
        found = [topic for panel in self.panels for topic in panel.topics]
        for claim in self.claims:
            for pair in claim.ratios:
                found += [cell.topic for cell in pair if isinstance(cell, Cell)]
        return tuple(dict.fromkeys(found))


def over(
    topic: str, workload: str, other: str, direction: str = "fwd", dtype: str | None = None
) -> Ratio:
    """Another contender's median over that of this package's Gluon path."""
    theirs, ours = (
        Cell(topic, workload, who, direction, dtype=dtype) for who in (other, "ikbo-gluon")
    )
    return theirs, ours
