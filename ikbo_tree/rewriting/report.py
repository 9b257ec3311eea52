"""What a rewrite did, op by op."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from ikbo_tree.extras import require
from ikbo_tree.rewriting.capture import source
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.values import Path, describe


@dataclass(frozen=True)
class Step:
    """One op of the original.

    Attributes:
        name: its node in the captured graph.
        op: what it calls.
        action: `"gathered"` (a broadcast, put off), `"sunk"` (on coarse rows), `"split"` by level,
            `"replaced"` by a tree op, or `"kept"`.
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
    """

    given: Declared
    steps: list[Step] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def count(self, action: str) -> int:
        """How many ops were treated so."""
        return sum(step.action == action for step in self.steps)

    def to_json(self) -> str:
        """Steps and checks."""
        steps = [asdict(step) for step in self.steps]
        return json.dumps({"steps": steps, "checks": self.checks}, indent=1)

    def show(self) -> None:
        """Prints a table of all steps (needs rich)."""
        table = require("rich.table", "cli").Table("op", "what became of it", "rows", "where")
        for step in self.steps:
            table.add_row(step.op.removeprefix("aten."), step.action, step.path, step.source)
        require("rich.console", "cli").Console().print(table)
