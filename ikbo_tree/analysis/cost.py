"""What work costs: floating-point operations and bytes, by op and level, and the least time.

Operations are two for each term of a product's sum, and one for each element of anything else.
Bytes are those that an op has to read and write if it is one kernel: each distinct element once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ikbo_tree.analysis.ceilings import Ceilings
from ikbo_tree.extras import require


class Cost(NamedTuple):
    """Of an op or of several.

    Attributes:
        flops: floating-point operations.
        bytes: read and written.
    """

    flops: int = 0
    bytes: int = 0

    def plus(self, other: Cost) -> Cost:
        """The sum."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def minus(self, other: Cost) -> Cost:
        """The difference; negative where the other is dearer."""
        return Cost(self.flops - other.flops, self.bytes - other.bytes)

    @property
    def intensity(self) -> float:
        """Operations a byte; 0 where nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0

    def roofline(self, flops_a_byte: float) -> float:
        """What takes longer, in bytes: its bytes, or those that could move while it calculates."""
        return max(self.bytes, self.flops / flops_a_byte)

    def seconds(self, ceilings: Ceilings) -> float:
        """The least time of one kernel that does it (Williams, Waterman, Patterson: roofline)."""
        return self.roofline(ceilings.flops_a_byte) / ceilings.bytes_per_second


def copies(rows: int, fine: int, width: int, size: int, out: int) -> Cost:
    """What it adds if `rows` rows are copied to `fine` ones.

    Args:
        rows: of the coarse level.
        fine: rows of the level that a flat model copies to.
        width: elements of a row.
        size: bytes of an element.
        out: columns of a linear map of the rows.

    Returns:
        Bytes written beyond the level's own size, and operations that the map spends on them.
    """
    copied = max(fine - rows, 0) * width
    return Cost(2 * copied * out, copied * size)


class Step(NamedTuple):
    """A part of some work.

    Attributes:
        op: the kernel; parts of one kernel share the name.
        level: whose rows are calculated on, or read.
        cost: of the part.
    """

    op: str
    level: str
    cost: Cost


@dataclass(frozen=True)
class Work:
    """What a call or a model does.

    Attributes:
        steps: parts in order.
    """

    steps: tuple[Step, ...]

    @property
    def total(self) -> Cost:
        """All steps together."""
        return _sum(step.cost for step in self.steps)

    def by_op(self) -> dict[str, Cost]:
        """Of each kernel, over all levels."""
        return self._grouped(lambda step: step.op)

    def by_level(self) -> dict[str, Cost]:
        """Of each level, over all kernels."""
        return self._grouped(lambda step: step.level)

    def seconds(self, ceilings: Ceilings) -> float:
        """The least time: one kernel after another, each at the ceiling that it meets first.

        Launches, partly filled devices and caches are not in it: a bound, not a forecast.
        """
        return sum(cost.seconds(ceilings) for cost in self.by_op().values())

    def _grouped(self, key: Callable[[Step], str]) -> dict[str, Cost]:
        found: dict[str, Cost] = {}
        for step in self.steps:
            found[key(step)] = found.get(key(step), Cost()).plus(step.cost)
        return found


@dataclass(frozen=True)
class Comparison:
    """One call in both forms.

    Attributes:
        tree: every tensor at its own level.
        flat: coarse tensors copied to the result's level first, then the op on the copies.
    """

    tree: Work
    flat: Work

    @property
    def extra(self) -> Cost:
        """What the flat form spends beyond the tree's."""
        return self.flat.total.minus(self.tree.total)

    def show(self, ceilings: Ceilings | None = None) -> None:
        """Prints both, op by op and level by level (needs rich)."""
        console = require("rich.console", "cli").Console()
        for name, work in (("flat", self.flat), ("tree", self.tree)):
            console.print(table(name, work, ceilings))


def table(title: str, work: Work, ceilings: Ceilings | None = None) -> object:
    """A rich table of some work, with the least time of each kernel if there are ceilings."""
    made = require("rich.table", "cli").Table(title=title)
    for column in ("op", "level"):
        made.add_column(column)
    for column in ("MFLOP", "MB", "FLOP/B", *(["ms at least"] if ceilings else [])):
        made.add_column(column, justify="right")
    kernels: Mapping[str, Cost] = work.by_op()
    named: set[str] = set()
    for step in work.steps:
        first, cost = step.op not in named, step.cost
        named.add(step.op)
        cells = [step.op if first else "", step.level, *_numbers(cost)]
        if ceilings:
            cells.append(f"{kernels[step.op].seconds(ceilings) * 1e3:.4g}" if first else "")
        made.add_row(*cells)
    cells = ["all", "", *_numbers(work.total)]
    made.add_row(*cells, *([f"{work.seconds(ceilings) * 1e3:.4g}"] if ceilings else []))
    return made


def _numbers(cost: Cost) -> tuple[str, str, str]:
    return readable(cost.flops / 1e6), readable(cost.bytes / 1e6), readable(cost.intensity)


def readable(x: float) -> str:
    """A number of a table: three digits behind the point, or three in all below 1."""
    return f"{x:,.3f}" if x >= 1 else f"{x:.3g}"


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total = total.plus(cost)
    return total
