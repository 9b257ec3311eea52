"""Writes the new graph: every node with the value it would have, and none twice."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from ikbo_tree.rewriting.values import ALONE, Map, Merged, Path, shape

aten = torch.ops.aten


class Builder:
    """A graph under construction.

    Attributes:
        graph: it.
        fake: the mode in which the values of its nodes live.
        origin: the original node that is being rewritten: where new ones say they come from.
    """

    def __init__(self, graph: fx.Graph, fake: FakeTensorMode) -> None:
        self.graph = graph
        self.fake = fake
        self.origin: fx.Node | None = None
        self._known: dict[Any, fx.Node] = {}
        self._inputs: dict[Any, tuple[fx.Node, int]] = {}
        self._gathered: dict[fx.Node, list[fx.Node]] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function without side effects; the node of an equal call, if there is one."""
        key = _key((target, args, kwargs))
        if key is not None and key in self._known:
            return self._known[key]
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.evaluate(target, *args, **kwargs)
        if self.origin is not None:
            for name in ("stack_trace", "nn_module_stack"):
                if name in self.origin.meta:
                    node.meta[name] = self.origin.meta[name]
        if key is not None:
            self._known[key] = node
        return node

    def evaluate(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call would give, as fake tensors; nothing is written."""
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        # Composite ops written in C++ would ask for sizes as numbers without the dispatcher's help.
        with self.fake, enable_python_dispatcher():
            return target(*values[0], **values[1])

    def outputs(self, node: fx.Node) -> fx.Node | tuple[Any, ...]:
        """A node, or one for each of its outputs."""
        value = node.meta["val"]
        if not isinstance(value, (tuple, list)):
            return node
        return tuple(
            self.call(operator.getitem, node, i) if isinstance(x, torch.Tensor) else None
            for i, x in enumerate(value)
        )

    def enter(self, node: fx.Node) -> None:
        """Takes note of an input's sizes: those of others that are equal are read from it."""
        sizes: list[Any] = list(shape(node))
        for dim, n in enumerate(sizes):
            if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol:
                self._inputs.setdefault(n.node.expr, (node, dim))

    def size(self, node: fx.Node, dim: int) -> fx.Node | int:
        """A size, as a number where it is one."""
        n: Any = shape(node)[dim]
        if isinstance(n, int):
            return n
        return self.call(aten.sym_size.int, *self._inputs.get(n.node.expr, (node, dim)))

    def times(self, size: fx.Node | int, factor: int) -> fx.Node | int:
        """A multiple of a size."""
        if factor == 1:
            return size
        return size * factor if isinstance(size, int) else self.call(operator.mul, size, factor)

    def plus(self, size: fx.Node | int, number: int) -> fx.Node | int:
        """A size and a number."""
        return size + number if isinstance(size, int) else self.call(operator.add, size, number)

    def divided(self, size: fx.Node | int, by: int) -> fx.Node | int:
        """A multiple of a number, divided by it."""
        if by == 1:
            return size
        if isinstance(size, int):
            return size // by
        return self.call(operator.floordiv, size, by)

    def compose(self, path: Path) -> fx.Node:
        """The rows of the coarsest level for each row of the finest, as one index."""
        index = path[0].index
        for step in path[1:]:
            index = self.call(aten.index_select.default, step.index, 0, index)
        return index

    def gather(self, node: fx.Node, path: Path, dim: int, merged: Merged = ALONE) -> fx.Node:
        """`node` along `path`."""
        if not path:
            return node
        found = self._gather(node, self.compose(path), dim, merged)
        self._gathered.setdefault(node, []).append(found)
        return found

    def gathers(self, node: fx.Node) -> bool:
        """Whether rows of `node` were gathered and the result is used."""
        return any(found.users for found in self._gathered.get(node, ()))

    def _gather(self, node: fx.Node, index: fx.Node, dim: int, merged: Merged) -> fx.Node:
        if merged == ALONE:
            return self.call(aten.index_select.default, node, dim, index)
        sizes: list[Any] = [self.size(node, d) for d in range(len(shape(node)))]
        rows: Any = self.divided(sizes[dim], merged.outer * merged.inner)
        middle = [merged.outer, rows, merged.inner]
        apart = self.call(aten.reshape.default, node, [*sizes[:dim], *middle, *sizes[dim + 1 :]])
        fine = self.call(aten.index_select.default, apart, dim + 1, index)
        rows = self.times(self.size(index, 0), merged.outer * merged.inner)
        return self.call(aten.reshape.default, fine, [*sizes[:dim], rows, *sizes[dim + 1 :]])

    def spread(self, mask: fx.Node, merged: Merged, behind: int) -> fx.Node:
        """[rows] as it broadcasts with a value that has those rows, `behind` dims before its last.

        Args:
            mask: one entry a row.
            merged: what shares the dim with the rows.
            behind: dims that follow that of the rows.
        """
        if merged != ALONE:
            mask = self.call(aten.reshape.default, mask, [1, -1, 1])
            mask = self.call(aten.expand.default, mask, [merged.outer, -1, merged.inner])
            mask = self.call(aten.reshape.default, mask, [-1])
        return self.call(aten.reshape.default, mask, [-1, *[1] * behind]) if behind else mask

    def inverse(self, step: Map, rows: fx.Node | int) -> tuple[fx.Node, fx.Node | None]:
        """Offsets and order of the inverse of a map to `rows` rows: the tree's, or by sorting."""
        if step.offsets is not None:
            return step.offsets, step.order
        ordered = self.call(aten.sort.stable, step.index, stable=True)
        device = step.index.meta["val"].device
        ends = self.call(aten.arange.default, self.plus(rows, 1), device=device)
        first = self.call(aten.searchsorted.Tensor, self.call(operator.getitem, ordered, 0), ends)
        return self.int32(first), self.int32(self.call(operator.getitem, ordered, 1))

    def int32(self, node: fx.Node) -> fx.Node:
        """The same integers."""
        if node.meta["val"].dtype == torch.int32:
            return node
        return self.call(aten.to.dtype, node, torch.int32)


def _key(value: Any) -> Any:
    """Hashable and equal for equal calls; None if there is no such thing."""
    flat, spec = tree_flatten(value)
    try:
        leaves = tuple((type(x), x) for x in flat)
        hash(leaves)
    except TypeError:
        return None
    return leaves, spec
