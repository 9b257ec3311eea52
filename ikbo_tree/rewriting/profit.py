"""Which of the possible rewrites save work on the example's rows; the others are not made.

A graph is priced op by op as a roofline has it: what takes longer, its bytes, or its operations at
so many a byte as the device does (`FLOPS_A_BYTE`). Launches are not counted: a compiler or a CUDA
graph takes them from both sides alike.

1. A gather that leads to no fewer rows is no broadcast: nothing is moved past it. So a model whose
   levels have equally many rows stays as it is.
2. Everything is rewritten that can be. Then each op that was split or replaced, each whose result
   is gathered though it is wider than what it was made of, and each gather that was put off is
   tried where the model has it. It stays there if the whole graph gets no dearer. What becomes
   doubtful by that is tried next.
3. If the graph is no cheaper than the original after all, the original's ops stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from ikbo_tree.analysis.cost import Cost
from ikbo_tree.rewriting.capture import Captured
from ikbo_tree.rewriting.cost import Counter
from ikbo_tree.rewriting.graph_pass import Rewriting
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.values import Lazy, Path

FLOPS_A_BYTE = {
    # Measured on an EPYC, one thread, float32: 93 GFLOP/s of matmul, 4.6 GB/s where results go to
    # fresh memory, as they do in eager and compiled models (42 GB/s into memory that was written).
    ("cpu", False): 20.0,
    # An H200 by its data sheet: 67 TFLOP/s in float32 without TF32, 989 in 16 bits, 4.8 TB/s.
    ("cuda", False): 14.0,
    ("cuda", True): 206.0,
}
"""Operations a device does while it moves a byte, by its type and whether floats have 16 bits."""

MOST_TRIALS = 150
"""A pass over a large model takes 0.1 s to 0.3 s, and there is one for each trial."""


class Profit:
    """Prices and compares graphs of one model.

    Attributes:
        counter: of operations and bytes.
    """

    def __init__(self, captured: Captured, given: Declared) -> None:
        self.captured = captured
        self.given = given
        self.counter = Counter(captured, given)
        self._balance = _balance(captured)

    def price(self, graph: fx.Graph) -> float:
        """Of all that the result needs, in bytes."""
        return self.counter.price(graph, self._balance)

    def reduces(self, path: Path) -> bool:
        """Whether a path leads to fewer rows."""
        rows = self.counter.rows
        return rows[path[-1].coarse] < rows[path[0].fine]

    def attempt(self, left: frozenset[str]) -> Rewriting:
        """The rewrite that leaves these nodes where the model has them."""
        rewriting = Rewriting(self.captured, self.given, left, self.reduces)
        rewriting.run()
        return rewriting

    def best(self) -> Rewriting:
        """The cheapest rewrite that the search finds."""
        left: frozenset[str] = frozenset()
        best = self.attempt(left)
        price = self.price(best.graph)
        tried: set[str] = set()
        while len(tried) < MOST_TRIALS:
            name = next((n for n in self._doubtful(best) if n not in tried), None)
            if name is None:
                break
            tried.add(name)
            trial = self.attempt(left | {name})
            own = self.price(trial.graph)
            if own <= price:
                left, best, price = left | {name}, trial, own
        if price >= self.price(self.captured.module.graph):
            gathers = {s.name for s in best.report.steps if s.action == "gathered"}
            best = self.attempt(left | gathers)
        return best

    def _doubtful(self, rewriting: Rewriting) -> Iterator[str]:
        """Nodes whose rewrite may cost more than it saves; gathers, which decide most, last."""
        actions = {step.name: step.action for step in rewriting.report.steps}
        for node in rewriting.env:
            if actions.get(node.name) in ("split", "replaced", "put off"):
                yield node.name
        for node, value in rewriting.env.items():
            moved = actions.get(node.name) == "sunk" and isinstance(value, Lazy)
            if moved and rewriting.build.gathers(value.node) and self._widens(node):
                yield node.name
        for node in rewriting.env:
            if actions.get(node.name) == "gathered":
                yield node.name

    def _widens(self, node: fx.Node) -> bool:
        """Whether a gather of the result moves more than one of the operands."""
        read = [
            self._elements(n)
            for n in node.all_input_nodes
            if n.op != "get_attr" and isinstance(n.meta.get("val"), torch.Tensor)
        ]
        return self._elements(node) > sum(read)

    def _elements(self, node: fx.Node) -> int:
        return self.counter.elements(node.meta["val"])

    def costs(self, graph: fx.Graph) -> Mapping[str, Cost]:
        """Operations and bytes of a graph, by level."""
        return self.counter.graph(graph)

    def note(self, rewriting: Rewriting) -> None:
        """Writes the cost of each op of the rewritten graph into the report."""
        costs = {node.name: cost for node, cost in self.counter.costs(rewriting.graph)}
        report = rewriting.report
        report.ops = [replace(op, cost=costs.get(op.name, op.cost)) for op in report.ops]


def _balance(captured: Captured) -> float:
    floats = [
        n.meta["val"]
        for n in captured.module.graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].is_floating_point()
    ]
    short = any(x.dtype in (torch.float16, torch.bfloat16) for x in floats)
    device = floats[0].device.type if floats else "cpu"
    key = ("cpu", False) if device == "cpu" else ("cuda", short)
    return FLOPS_A_BYTE[key]
