"""What a graph costs on given numbers of rows: floating-point operations and bytes, op by op.

Counted as in `ikbo_tree.analysis.cost`, every op a kernel of its own. A gather reads no more rows
than it writes. Views cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx

from ikbo_tree.analysis.cost import Cost
from ikbo_tree.rewriting.capture import Captured
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.lineage import Bounds, starts

aten = torch.ops.aten


_NAMES = """
    view _unsafe_view unsqueeze squeeze transpose permute t numpy_T expand slice select narrow split
    split_with_sizes chunk unbind alias detach diagonal unfold unflatten sym_size lift_fresh
"""
_VIEWS = {getattr(aten, name) for name in _NAMES.split()}
_COPIES_IF_SCATTERED = {aten.reshape, aten.flatten, aten.contiguous}
_GATHERS = {aten.index_select, aten.index, aten.embedding, aten.gather, aten.repeat_interleave}
_FACTORS = {
    aten.linear: "input", aten.mm: "self", aten.bmm: "self", aten.matmul: "self", aten.mv: "self",
    aten.dot: "self", aten.addmm: "mat1", aten.baddbmm: "batch1",
}  # fmt: skip
"""Products, and the argument whose last dim is summed over."""


class Counter:
    """Counts for one model on the rows of its example.

    Attributes:
        rows: of each level.
    """

    def __init__(self, captured: Captured, given: Declared) -> None:
        self._values: dict[sympy.Symbol, sympy.Integer] = {}
        self._levels: dict[sympy.Symbol, str] = {}
        self._numbers: dict[sympy.Expr, int] = {}
        self.rows: dict[str, int] = {}
        self._order = given.all_levels()
        leaves = pytree.tree_leaves(given.example)
        for node, leaf in zip(captured.placeholders.values(), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                self._learn(node.meta["val"].shape, leaf.shape)
        for node, place in starts(given, captured.placeholders).items():
            # Offsets have one more than rows.
            size: Any = node.meta["val"].shape[0] - int(isinstance(place, Bounds))
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                symbol = size.node.expr
                self._levels[symbol] = place.level
                if place.level in given.ranges:
                    self._values[symbol] = sympy.Integer(given.ranges[place.level].usual)
            self.rows[place.level] = self.number(size)

    def _learn(self, shape: Sequence[Any], actual: torch.Size) -> None:
        """The numbers that symbols stand for; a tree's offsets have one more than rows."""
        for size, n in zip(shape, actual, strict=True):
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                (symbol,) = expression.free_symbols or {None}
                if symbol is not None and (expression - symbol).is_Integer:
                    self._values.setdefault(symbol, n - (expression - symbol))

    def number(self, size: Any) -> int:
        """A size on the example's rows."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression not in self._numbers:
            known = sympy.sympify(size.node.shape_env.replace(expression)).xreplace(self._values)
            # What has no number yet was counted from values: rows of the finest level.
            if known.free_symbols:
                finest = sympy.Integer(self.rows[self._order[-1]])
                known = known.xreplace(dict.fromkeys(known.free_symbols, finest))
            self._numbers[expression] = int(known)
        return self._numbers[expression]

    def level(self, node: fx.Node) -> str:
        """The finest level whose rows an op sees; `"-"` for none."""
        found = -1
        for x in _tensors([n.meta.get("val") for n in (node, *node.all_input_nodes)]):
            symbols = [symbol for size in x.shape for symbol in _symbols(size)]
            known = [self._levels[symbol] for symbol in symbols if symbol in self._levels]
            found = max([found, *(self._order.index(level) for level in known)])
        return self._order[found] if found >= 0 else "-"

    def elements(self, x: torch.Tensor, *, distinct: bool = False) -> int:
        """Of a tensor; `distinct` counts those of an expanded dim once."""
        sizes = zip(x.shape, x.stride(), strict=True)
        return math.prod(self.number(n) for n, stride in sizes if not distinct or stride != 0)

    def graph(self, graph: fx.Graph) -> dict[str, Cost]:
        """By level, of everything that the result needs."""
        found: dict[str, Cost] = {}
        for node, cost in self.costs(graph):
            level = self.level(node)
            found[level] = found.get(level, Cost()).plus(cost)
        return {level: found[level] for level in [*self._order, "-"] if level in found}

    def price(self, graph: fx.Graph, flops_a_byte: float) -> float:
        """The sum over ops of the larger of bytes and operations, these divided."""
        return sum(cost.roofline(flops_a_byte) for _, cost in self.costs(graph))

    def costs(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, Cost]]:
        """Of each op that the result needs, backwards."""
        needed: set[fx.Node] = set(graph.find_nodes(op="output"))
        for node in reversed(graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
                cost = self.node(node) if node.op == "call_function" else Cost()
                if cost != Cost():
                    yield node, cost

    def node(self, node: fx.Node) -> Cost:
        """Of one op."""
        packet = getattr(node.target, "overloadpacket", None)
        outputs = _tensors(node.meta.get("val"))
        if packet is None or packet in _VIEWS or not outputs:
            return Cost()
        inputs = _tensors([n.meta.get("val") for n in node.all_input_nodes])
        if packet in _COPIES_IF_SCATTERED and self._is_view(inputs[0], outputs[0]):
            return Cost()
        written = sum(self.elements(x) * x.element_size() for x in outputs)
        if packet in _GATHERS:
            index = sum(self._bytes(x) for x in inputs if not x.is_floating_point())
            return Cost(0, min(2 * written + index, written + sum(map(self._bytes, inputs))))
        read = sum(map(self._bytes, inputs))
        return Cost(self._flops(node, packet, inputs, outputs), read + written)

    def _is_view(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether the shape of `out` can be had without copying."""
        sizes, strides, wanted = (
            [self.number(n) for n in values] for values in (x.shape, x.stride(), out.shape)
        )
        try:
            torch.empty_strided(sizes, strides, device="meta").view(wanted)
        except RuntimeError:
            return False
        return True

    def _bytes(self, x: torch.Tensor) -> int:
        return self.elements(x, distinct=True) * x.element_size()

    def _flops(self, node: fx.Node, packet: Any, inputs: Any, outputs: Any) -> int:
        assert isinstance(node.target, torch._ops.OpOverload)
        names = [argument.name for argument in node.target._schema.arguments]
        args = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if packet in _FACTORS:
            factor = args[_FACTORS[packet]]
            assert isinstance(factor, fx.Node)
            return 2 * self.elements(outputs[0]) * self.number(factor.meta["val"].shape[-1])
        if packet in _SPECIAL:
            values = {n: fx.node.map_arg(x, lambda a: a.meta["val"]) for n, x in args.items()}
            return _SPECIAL[packet](self, values)
        return max(self.elements(x) for x in (*inputs, *outputs))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _einsum(counter: Counter, args: Mapping[str, Any]) -> int:
    labels = str(args["equation"]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for label, x in zip(labels, args["tensors"], strict=True):
        if len(label) == x.dim():
            sizes |= {name: counter.number(n) for name, n in zip(label, x.shape, strict=True)}
    return 2 * math.prod(sizes.values())


def _attention(counter: Counter, args: Mapping[str, Any]) -> int:
    q, k, v = (args[name] for name in ("query", "key", "value"))
    widths = counter.number(q.shape[-1]) + counter.number(v.shape[-1])
    scores = counter.elements(q) // max(1, counter.number(q.shape[-1]))
    return 2 * scores * counter.number(k.shape[-2]) * widths


def _tree_attention(counter: Counter, args: Mapping[str, Any]) -> int:
    q = args["q"]
    width = counter.number(q.shape[-1])
    scores = counter.elements(q) // max(1, width)
    pairs = zip(args["k"], args["v"], strict=True)
    return sum(
        2 * scores * counter.number(k.shape[1]) * (width + counter.number(v.shape[-1]))
        for k, v in pairs
    )


def _stages(counter: Counter, args: Mapping[str, Any]) -> int:
    pairs = zip(args["x"], args["weight"], strict=True)
    return sum(2 * counter.elements(x) * counter.number(w.shape[0]) for x, w in pairs)


def _convolution(counter: Counter, args: Mapping[str, Any]) -> int:
    weight, x = args["weight"], args["input"]
    return 2 * counter.number(x.shape[0]) * counter.number(x.shape[-1]) * counter.elements(weight)


_SPECIAL: dict[Any, Callable[[Counter, Mapping[str, Any]], int]] = {
    aten.einsum: _einsum,
    aten.scaled_dot_product_attention: _attention,
    aten.conv1d: _convolution,
    torch.ops.ikbo_tree.target_attention: _tree_attention,
    torch.ops.ikbo_tree.linear: _stages,
    torch.ops.ikbo_tree.linear_compression: _stages,
}


def _symbols(size: Any) -> set[sympy.Symbol]:
    if not isinstance(size, torch.SymInt):
        return set()
    found: set[sympy.Symbol] = sympy.sympify(
        size.node.shape_env.replace(size.node.expr)
    ).free_symbols
    return found
