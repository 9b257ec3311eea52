"""Which level's rows a graph's values have, and where: found by the rules, op by op.

Inputs have the levels that were declared. An op for which the rows are a batch passes them on; a
gather by a map gives the rows of the map. What has no rule, or works across rows, takes rows
together (`Mixture`): then no row of the result belongs to one row of a level, and rows beyond the
live ones would count. Sizes are looked at only for what is made from sizes, as zeros are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx

from ikbo_tree.kernels.common.library import NAMESPACE
from ikbo_tree.rewriting.arguments import bind, swapped_nodes
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.rowwise import RULES, Operand, RowCall, aten, front
from ikbo_tree.rewriting.values import ALONE, Merged, shape


@dataclass(frozen=True)
class Place:
    """Rows of a level, one by one.

    Attributes:
        level: its name.
        dim: where they are.
        merged: what they share the dim with.
    """

    level: str
    dim: int = 0
    merged: Merged = ALONE


@dataclass(frozen=True)
class Mixture:
    """A value that several rows of a level have gone into.

    Attributes:
        level: the finest of them.
        node: the op that took them together.
        why: what it does, as the end of a sentence.
    """

    level: str
    node: fx.Node
    why: str


@dataclass(frozen=True)
class Bounds:
    """Offsets: one more than there are rows of a level."""

    level: str


Found: TypeAlias = "Place | Mixture | Bounds | tuple[Any, ...] | None"

_MADE = {
    getattr(aten, name)
    for name in (
        "zeros", "ones", "full", "empty", "arange", "zeros_like", "ones_like", "full_like",
        "empty_like", "expand", "repeat", "tile",
    )
}  # fmt: skip
"""Ops whose result is the same for any row, or its number."""


def starts(given: Declared, placeholders: Mapping[str, fx.Node]) -> dict[fx.Node, Place | Bounds]:
    """What is declared of a graph's inputs, by the fields of the tree among them."""
    found: dict[fx.Node, Place | Bounds] = {
        placeholders[name]: Place(level)
        for name, level in given.batches.items()
        if name in placeholders
    }
    if given.tree is None:
        return found
    tree = given.example[given.tree]
    levels, at = tree.levels, 1
    for fine, coarse in tree.structure.pairs:
        pair: tuple[Place | Bounds, ...] = (Place(levels[fine]), Bounds(levels[coarse]))
        for i, place in enumerate(pair):
            name = f"{given.tree}.{at + i}"
            if name in placeholders:
                found[placeholders[name]] = place
        at += 2 if tree.is_sorted else 3
    return found


class Lineage:
    """The places of a graph's values.

    Args:
        known: those of its inputs.
        levels: coarse first.

    Attributes:
        places: of every node that was `read`.
    """

    def __init__(self, known: Mapping[fx.Node, Place | Bounds], levels: list[str]) -> None:
        self.places: dict[fx.Node, Found] = {}
        self._known = known
        self._levels = levels
        self._symbols: dict[sympy.Expr, str] = {}
        for node, place in known.items():
            size = _expression(shape(node)[0]) - int(isinstance(place, Bounds))
            if size.is_Symbol:
                self._symbols.setdefault(size, place.level)

    def read(self, nodes: Iterable[fx.Node]) -> Lineage:
        """Finds the places of nodes, in their order."""
        for node in nodes:
            if node.op == "call_function":
                self.places[node] = self._call(node)
            else:
                self.places[node] = self._known.get(node)
        return self

    def level(self, node: fx.Node) -> str | None:
        """Whose rows an op works on: those of its result, or the finest that it reads."""
        found = self._levels_of([self.places.get(node)])
        if not found:
            found = self._levels_of(self.places.get(n) for n in node.all_input_nodes)
        return max(found, key=self._levels.index, default=None)

    def reads(self, node: fx.Node) -> list[str]:
        """The levels of an op's operands, coarse first."""
        found = self._levels_of(self.places.get(n) for n in node.all_input_nodes)
        return sorted(found, key=self._levels.index)

    def _levels_of(self, values: Iterable[Found]) -> set[str]:
        leaves = pytree.tree_leaves(
            list(values), is_leaf=lambda x: not isinstance(x, (list, tuple))
        )
        return {x.level for x in leaves if isinstance(x, (Place, Mixture, Bounds))}

    def _call(self, node: fx.Node) -> Found:
        target = node.target
        if target is operator.getitem:
            found = self.places[node.args[0]]  # type: ignore[index]
            return found[node.args[1]] if isinstance(found, tuple) else found  # type: ignore[index]
        if not isinstance(target, torch._ops.OpOverload) or not gives_tensors(node):
            return None
        if target.namespace == NAMESPACE:
            return self._made(node)
        args = bind(target, node.args, dict(node.kwargs))
        read = [self.places.get(n) for n in node.all_input_nodes]
        mixed = [x for x in read if isinstance(x, Mixture)]
        if mixed:
            return mixed[0]
        placed = [x for x in read if isinstance(x, Place)]
        special = _SPECIAL.get(target.overloadpacket)
        found = special(self, node, args) if special is not None else None
        if found is None and not placed:
            found = self._made(node) if target.overloadpacket in _MADE else None
        elif found is None:
            found = self._by_rule(node, args, placed)
        if target.overloadpacket is not aten.arange and _counts(node):
            return Mixture(self._finest(placed), node, "calculates with the number of rows")
        return found

    def _by_rule(self, node: fx.Node, args: dict[str, Any], placed: list[Place]) -> Found:
        mixture = Mixture(self._finest(placed), node, "may mix rows")
        rule = RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is None or len({place.level for place in placed}) > 1:
            return mixture

        def operand(n: fx.Node) -> Any:
            place = self.places.get(n)
            return Operand(n, place.dim, place.merged) if isinstance(place, Place) else n

        first = next(n for n in node.all_input_nodes if gives_tensors(n))
        rows = rule(RowCall(swapped_nodes(args, operand), node.meta["val"], shape(first)))
        if rows is None:
            return mixture
        level = placed[0].level
        if isinstance(node.meta["val"], (tuple, list)):
            many = len(node.meta["val"])
            dims = (rows.dim,) * many if isinstance(rows.dim, int) else rows.dim
            return tuple(None if d is None else Place(level, d, rows.merged) for d in dims)
        assert isinstance(rows.dim, int)
        return Place(level, rows.dim, rows.merged)

    def _made(self, node: fx.Node) -> Found:
        """Of results that are made by sizes: the one dim that has as many rows as a level."""
        if isinstance(node.meta["val"], (tuple, list)):
            return tuple(self._of_sizes(x) for x in node.meta["val"])
        return self._of_sizes(node.meta["val"])

    def _of_sizes(self, value: Any) -> Found:
        if not isinstance(value, torch.Tensor):
            return None
        sizes = [self._symbols.get(_expression(n)) for n in value.shape]
        found = [(dim, level) for dim, level in enumerate(sizes) if level is not None]
        return Place(found[0][1], found[0][0]) if len(found) == 1 else None

    def _finest(self, places: Iterable[Found]) -> str:
        return max(self._levels_of(places), key=self._levels.index, default=self._levels[-1])


_Special: TypeAlias = Callable[[Lineage, fx.Node, dict[str, Any]], Found]


def _gather(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """Rows of one level chosen by a vector with a number for each row of another."""
    x, index, dim = _gathered(args)
    if not isinstance(index, fx.Node):
        return None
    own, place = lineage.places.get(x), lineage.places.get(index)
    if not isinstance(place, Place) or place.merged != ALONE or len(shape(index)) != 1:
        return None
    if index.meta["val"].dtype == torch.bool:
        return None
    dim = front(dim, len(shape(x)))
    if own is None or (isinstance(own, Place) and (own.dim, own.merged) == (dim, ALONE)):
        return Place(place.level, dim)
    return None


def _gathered(args: dict[str, Any]) -> tuple[fx.Node, Any, int]:
    """What is gathered, by what, and along which dim."""
    if "weight" in args:
        return args["weight"], args["indices"], 0
    if "indices" not in args:
        return args["self"], args["index"], args["dim"]
    used = [(i, index) for i, index in enumerate(args["indices"]) if index is not None]
    return args["self"], used[0][1] if len(used) == 1 else None, used[0][0] if used else 0


def _joined(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """Side by side along another dim; a stack has a new one."""
    places = {lineage.places.get(x) for x in args["tensors"]}
    (place,) = places if len(places) == 1 else (None,)
    stacked = isinstance(node.target, torch._ops.OpOverload) and (
        node.target.overloadpacket is aten.stack
    )
    dim = front(args.get("dim", 1), len(shape(node)))
    if not isinstance(place, Place) or ("dim" not in args and len(shape(node)) < 2):
        return None
    if stacked:
        return Place(place.level, place.dim + (dim <= place.dim), place.merged)
    return None if dim == place.dim else place


def _bounds(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """All offsets but the first, or but the last: one a row."""
    own = lineage.places.get(args["self"])
    return lineage._made(node) if isinstance(own, Bounds) else None


def _marked(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """Whether rows have any below them: nothing but a map is read."""
    blank = args["self"]
    return lineage.places.get(blank) if blank.target is aten.zeros.default else None


def _of_the_first(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """The other operand says nothing but a dtype."""
    return lineage.places.get(args["self"])


def _new(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """The operand says nothing but a dtype and a device."""
    return lineage._made(node)


def _repeated(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """By numbers of children, which are one a row."""
    counts = args["repeats"]
    placed = isinstance(counts, fx.Node) and isinstance(lineage.places.get(counts), Place)
    return lineage._made(node) if placed else None


def _bags(lineage: Lineage, node: fx.Node, args: dict[str, Any]) -> Found:
    """A bag is the ids of a row: `offsets = arange(0, rows * length, length)`."""
    place, begins = lineage.places.get(args["indices"]), args["offsets"]
    if not isinstance(place, Place) or place.dim or begins.target is not aten.arange.start_step:
        return None
    outer, length = place.merged
    step = begins.args[2] if len(begins.args) > 2 else 1
    if outer != 1 or begins.args[0] != 0 or step != length or args["include_last_offset"]:
        return None
    if args["per_sample_weights"] is not None:
        return None
    return (Place(place.level), None, None, None)


_SPECIAL: dict[Any, _Special] = {
    aten.index_select: _gather, aten.index: _gather, aten.embedding: _gather,
    aten.cat: _joined, aten.stack: _joined, aten.concat: _joined, aten.concatenate: _joined,
    aten.hstack: _joined, aten.column_stack: _joined, aten.repeat_interleave: _repeated,
    aten.slice: _bounds, aten.embedding_bag: _bags, aten.index_fill: _marked,
    aten.type_as: _of_the_first, aten.new_zeros: _new, aten.new_ones: _new, aten.new_full: _new,
}  # fmt: skip


def gives_tensors(node: fx.Node) -> bool:
    """Whether an op gives tensors."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, torch.Tensor) for x in leaves)


def _counts(node: fx.Node) -> bool:
    """Whether an op calculates with a number that follows from sizes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    args = bind(node.target, node.args, dict(node.kwargs))
    numbers = (
        args[argument.name]
        for argument in node.target._schema.arguments
        if str(argument.type) in ("Tensor", "number")
    )
    nodes = [x for x in numbers if isinstance(x, fx.Node)]
    return any(isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat)) for n in nodes)


def _expression(size: Any) -> sympy.Expr:
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    return sympy.sympify(size.node.shape_env.replace(size.node.expr))
