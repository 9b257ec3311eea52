"""What a rewrite did, op by op."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path as File
from typing import Any

from torch import fx

from ikbo_tree.analysis.cost import Cost
from ikbo_tree.extras import require
from ikbo_tree.rewriting import picture
from ikbo_tree.rewriting.capture import dynamic_shapes
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.ranges import Range, dims
from ikbo_tree.rewriting.refusals import source
from ikbo_tree.rewriting.values import Path, describe


@dataclass(frozen=True)
class Step:
    """One op of the original.

    Attributes:
        name: its node in the captured graph.
        op: what it calls.
        action: `"gathered"` (a broadcast, put off), `"sunk"` (on coarse rows), `"split"` by level,
            `"replaced"` by a tree op, `"put off"` (done in whole only where its result is taken in
            whole), `"left"` alone since moving it saves nothing, or `"kept"`,
            for want of a rule or of anything to move.
        path: levels between the rows it had and those it has now.
        source: the model's line.
    """

    name: str
    op: str
    action: str
    path: str
    source: str

    @staticmethod
    def of(node: fx.Node, done: tuple[str, Path], lazy: str) -> Step:
        """Of a node that was rewritten."""
        action, path = done
        return Step(
            node.name, str(node.target), action, describe(path) if path else lazy, source(node)
        )


@dataclass(frozen=True)
class Op:
    """One op of the rewritten model.

    Attributes:
        name: its node in the graph.
        op: what it calls.
        level: the level that it has its rows from; None: it has none.
        reads: the levels of its operands, coarse first.
        together: whether it, or one before it, may take rows of a level together, as a sum over
            rows does; else every row of its result belongs to one row of the level.
        source: the model's line.
        cost: operations and bytes, on the usual rows or the example's.
    """

    name: str
    op: str
    level: str | None
    reads: tuple[str, ...]
    together: bool
    source: str
    cost: Cost = field(default_factory=Cost)


@dataclass
class Report:
    """What a rewrite did.

    Attributes:
        given: the declarations.
        steps: the original's ops in order.
        ops: the rewritten model's ops in order, each with its level.
        graph: the rewritten model's.
        checks: random trees on which the result was compared.
        before: operations and bytes of the original on the example's rows, by level of its ops.
        after: the same of the rewritten model.
    """

    given: Declared
    steps: list[Step] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    graph: fx.Graph = field(default_factory=fx.Graph, repr=False)
    checks: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Cost] = field(default_factory=dict)
    after: dict[str, Cost] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, Range]:
        """(least, usual, most) rows of each level for which they were given."""
        return dict(self.given.ranges)

    @property
    def inputs(self) -> dict[str, str]:
        """The rewritten model's inputs, and the original's that it has no more, a phrase each."""
        given = self.given
        found = {}
        for name in given.example:
            level = given.batches.get(name)
            found[name] = f"rows of {level}" if level else "as it was"
            if name in given.compact and level != given.levels[name]:
                found[name] += f", no more of {given.levels[name]}"
        if given.tree is not None:
            found[given.tree] = f"the tree {given.example[given.tree]}"
        return found | {
            name: f"left out: the tree has it ({r.kind} of {r.fine} and {r.coarse})"
            for name, r in given.replaced.items()
        }

    def dynamic_shapes(self) -> dict[str, Any]:
        """For `torch.export.export(fast, ..., dynamic_shapes=...)`: a named Dim for each level.

        Of a level whose rows were given, the Dim has their least and most; a level with just one
        number has that. AOTInductor takes these ranges from the exported program.

        Raises:
            TreeError: a level that is said to have at most one row, but not always the same.
        """
        return dynamic_shapes(self.given, dims(self.given.all_levels(), self.rows))

    def count(self, action: str) -> int:
        """How many ops were treated so."""
        return sum(step.action == action for step in self.steps)

    def to_json(self) -> str:
        """Inputs, steps, ops with levels, rows and costs, costs by level, and checks."""
        steps = [asdict(step) for step in self.steps]
        rows = {level: own._asdict() for level, own in self.rows.items()}
        ops = [
            {**asdict(op), "cost": op.cost._asdict(), "rows": rows.get(op.level or "")}
            for op in self.ops
        ]
        costs = {
            name: {level: cost._asdict() for level, cost in found.items()}
            for name, found in (("before", self.before), ("after", self.after))
        }
        levels = {level: rows.get(level) for level in self.given.all_levels()}
        parts = {"inputs": self.inputs, "levels": levels, "steps": steps, "ops": ops}
        return json.dumps({**parts, "costs": costs, "checks": self.checks}, indent=1)

    def draw(self, path: str | File) -> None:
        """Writes a picture of the rewritten graph, coloured by level.

        Args:
            path: a name that ends in `.dot` for Graphviz's language, else in what matplotlib
                writes, as `.png` or `.svg` (needs matplotlib, extra `cli`).
        """
        picture.draw(self, File(path))

    def show(self) -> None:
        """Prints tables: inputs, steps, ops and their costs, levels and rows (needs rich)."""
        make = require("rich.table", "cli").Table
        steps = make("op", "what became of it", "rows", "where")
        for step in self.steps:
            steps.add_row(step.op.removeprefix("aten."), step.action, step.path, _line(step.source))
        costs = make("level", "MFLOP before", "after", "MB before", "after")
        for level in dict.fromkeys([*self.before, *self.after]):
            was, now = self.before.get(level, Cost()), self.after.get(level, Cost())
            numbers = (was.flops, now.flops, was.bytes, now.bytes)
            costs.add_row(level, *(f"{n / 1e6:.3f}" for n in numbers))
        console = require("rich.console", "cli").Console()
        for table in (self._inputs(make), steps, self._ops(make), self._levels(make), costs):
            console.print(table)

    def _inputs(self, make: Any) -> Any:
        table = make("input", "in the rewritten model")
        for name, what in self.inputs.items():
            table.add_row(name, what)
        return table

    def _ops(self, make: Any) -> Any:
        """The rewritten model's ops that cost anything."""
        table = make("rewritten op", "level", "MFLOP", "MB", "where")
        for op in self.ops:
            if op.cost != Cost():
                flops, moved = (f"{n / 1e6:.3f}" for n in op.cost)
                name = op.op.removeprefix("aten.")
                table.add_row(name, op.level or "-", flops, moved, _line(op.source))
        return table

    def _levels(self, make: Any) -> Any:
        """How many ops of the rewritten model work on each level, and on how many rows."""
        table = make("level", "ops", "take rows together", "least rows", "usual", "most")
        for level in (*self.given.all_levels(), None):
            own = [op for op in self.ops if op.level == level]
            together = sum(op.together for op in own)
            rows = self.rows.get(level or "", ("", "", ""))
            table.add_row(level or "-", str(len(own)), str(together), *map(str, rows))
        return table


def _line(source: str) -> str:
    """The file's name, the line and its code."""
    found = re.fullmatch(r' \("(.*)", line (\d+), in .*: `(.*)`\)', source)
    return f"{File(found[1]).name}:{found[2]} {found[3]}" if found else source
