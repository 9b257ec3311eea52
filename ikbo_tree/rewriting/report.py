"""What a rewrite did, op by op."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from ikbo_tree.extras import require
from ikbo_tree.rewriting.capture import source
from ikbo_tree.rewriting.cost import Cost
from ikbo_tree.rewriting.inputs import Declared
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


@dataclass
class Report:
    """What a rewrite did.

    Attributes:
        given: the declarations.
        steps: the original's ops in order.
        checks: random trees on which the result was compared.
        before: operations and bytes of the original on the example's rows, by level of its ops.
        after: the same of the rewritten model.
    """

    given: Declared
    steps: list[Step] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Cost] = field(default_factory=dict)
    after: dict[str, Cost] = field(default_factory=dict)

    def count(self, action: str) -> int:
        """How many ops were treated so."""
        return sum(step.action == action for step in self.steps)

    def to_json(self) -> str:
        """Steps, costs by level and checks."""
        steps = [asdict(step) for step in self.steps]
        costs = {
            name: {level: cost._asdict() for level, cost in found.items()}
            for name, found in (("before", self.before), ("after", self.after))
        }
        return json.dumps({"steps": steps, "costs": costs, "checks": self.checks}, indent=1)

    def show(self) -> None:
        """Prints a table of all steps and one of costs (needs rich)."""
        make = require("rich.table", "cli").Table
        steps = make("op", "what became of it", "rows", "where")
        for step in self.steps:
            steps.add_row(step.op.removeprefix("aten."), step.action, step.path, step.source)
        costs = make("level", "MFLOP before", "after", "MB before", "after")
        for level in dict.fromkeys([*self.before, *self.after]):
            was, now = self.before.get(level, Cost()), self.after.get(level, Cost())
            numbers = (was.flops, now.flops, was.bytes, now.bytes)
            costs.add_row(level, *(f"{n / 1e6:.3f}" for n in numbers))
        console = require("rich.console", "cli").Console()
        console.print(steps)
        console.print(costs)
