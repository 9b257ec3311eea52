"""Interprets a model's graph on the values of `values`, and writes the new graph as it goes.

Each op is tried in this order: a gather along a declared map, which is put off; a rule for mixed
levels (`splitting`, `attention`); the op on coarse rows (`rowwise`); the op part by part, along the
dim of a concatenation; and, always right, the op where the model has it, on gathered operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from ikbo_tree.rewriting import rowwise_products, rowwise_views  # noqa: F401  register rules
from ikbo_tree.rewriting.arguments import (
    VALUES,
    arranged,
    bind,
    flatten,
    swapped_args,
    swapped_operands,
)
from ikbo_tree.rewriting.builder import Builder, aten
from ikbo_tree.rewriting.lookups import LOOK_UPS, referenced
from ikbo_tree.rewriting.rowwise import ROWS, RULES, Operand, RowCall, Rows
from ikbo_tree.rewriting.values import (
    Cat,
    Dense,
    Index,
    Later,
    Lazy,
    Map,
    Merged,
    Path,
    Value,
    common,
    describe,
    shape,
)


@dataclass(frozen=True)
class Call:
    """A call to be rewritten.

    Attributes:
        target: op overload.
        args: by the names of its schema, defaults filled in; tensors are Values.
        out: what it gives in the original, on fine rows, as a fake tensor or several.
    """

    target: Any
    args: dict[str, Any]
    out: Any

    @property
    def packet(self) -> Any:
        """The op, whatever the overload."""
        return getattr(self.target, "overloadpacket", self.target)

    def values(self) -> list[Value]:
        """Its tensor arguments."""
        return [x for x in flatten(self.args.values()) if isinstance(x, VALUES)]


Structural: TypeAlias = Callable[["Engine", Call], Any]

STRUCTURAL: dict[Any, list[Structural]] = {}
"""Rules for mixed levels by op; each gives a Value (several for several outputs) or None."""


def structural(*names: str) -> Callable[[Structural], Structural]:
    """Registers one for ops of `aten`."""

    def register(function: Structural) -> Structural:
        for name in names:
            STRUCTURAL.setdefault(getattr(aten, name), []).append(function)
        return function

    return register


class Engine:
    """Rewrites call after call.

    Attributes:
        build: writes the new graph.
        counts: maps by the node of the counts that describe them.
        between: maps of a tree, from each level to each above it.
        live: live counts [1] of the levels of a tree with a capacity.
        maps: paths as one map, made so far.
        done: what became of the call under way: "sunk", "split", "replaced", "kept", "left".
        reduces: whether a path leads to fewer rows.
    """

    def __init__(self, build: Builder, reduces: Callable[[Path], bool]) -> None:
        self.build = build
        self.reduces = reduces
        self.counts: dict[fx.Node, Map] = {}
        self.between: dict[tuple[str, str], Map] = {}
        self.live: dict[str, fx.Node] = {}
        self.maps: dict[Path, Map] = {}
        self.done: tuple[str, Path] = ("kept", ())

    def run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Rewrites a call of the original graph; its Values by position and keyword."""
        call = Call(target, bind(target, args, kwargs), out)
        self.done = ("kept", ())
        return self.rewritten(call)

    def leave(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """A call that is not worth rewriting."""
        self.done = ("left", ())
        return self.kept(Call(target, bind(target, args, kwargs), out))

    def apply(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Rewrites a call that a rule makes on Values."""
        return self.apply_bound(target, bind(target, args, kwargs))

    def apply_bound(self, target: Any, bound: dict[str, Any]) -> Any:
        """The same, with arguments by the names of the schema."""
        positional, named = arranged(target, swapped_args(bound, self.like))
        return self.rewritten(
            Call(target, bound, self.build.evaluate(target, *positional, **named))
        )

    def rewritten(self, call: Call) -> Any:
        """What a call gives, by the first rule that knows."""
        lazy = any(not isinstance(x, Dense) for x in call.values())
        if not lazy and call.packet is not aten.repeat_interleave:
            return self.kept(call)
        for structure in STRUCTURAL.get(call.packet, ()):
            found = structure(self, call)
            if found is not None:
                return found
        for attempt in (self.sunk, self.distributed):
            found = attempt(call)
            if found is not None:
                return found
        return self.kept(call)

    def kept(self, call: Call) -> Any:
        """The op itself, on gathered operands."""
        call = self._by_map(call)
        args = swapped_args(call.args, self.dense)
        if call.packet in (aten.view, aten._unsafe_view) and "size" in args:
            # Operands may have other strides than in the original.
            node = self.build.call(aten.reshape.default, args["self"], args["size"])
        else:
            node = self.emit(call.target, args)
        found = self.build.outputs(node)
        if isinstance(found, tuple):
            return tuple(None if x is None else Dense(x) for x in found)
        return Dense(found) if isinstance(node.meta["val"], torch.Tensor) else found

    def _by_map(self, call: Call) -> Call:
        """A repetition by counts as a gather, where these say nothing of rows beyond live ones."""
        repeats = call.args.get("repeats")
        step = self.counts.get(repeats.node) if isinstance(repeats, Dense) else None
        if call.packet is not aten.repeat_interleave or step is None or step.live is None:
            return call
        index = Dense(step.index)
        if "self" not in call.args:
            return Call(aten.to.dtype, bind(aten.to.dtype, (index, call.out.dtype), {}), call.out)
        args = (call.args["self"], call.args["dim"], index)
        return Call(aten.index_select.default, bind(aten.index_select.default, args, {}), call.out)

    def sunk(self, call: Call) -> Any:
        """The op on the coarsest rows that all its lazy operands have."""
        rule = RULES.get(call.packet)
        lazies = [self.plain(x) for x in call.values() if not isinstance(x, Dense)]
        path = common([path_of(x) for x in lazies if not isinstance(x, Dense)])
        if rule is None or not path:
            return None

        def operand(value: Value) -> Any:
            plain = self.plain(value)
            if isinstance(plain, Dense):
                return plain.node
            at = self.at(plain, len(path))
            return Operand(at.node, at.dim, at.merged)

        row_call = RowCall(swapped_args(call.args, operand), call.out, self.fine_shape(call))
        rows = rule(row_call)
        if rows is None:
            return None
        if call.packet in LOOK_UPS:
            name = LOOK_UPS[call.packet]
            ids = row_call.args[name]
            safe = swapped_operands(ids, lambda x: referenced(self.build, self.whole(path), x))
            row_call = replace(row_call, args={**row_call.args, name: safe})
        self.done = ("sunk", path)
        node = self.at_rows(call, row_call, rows)
        found = self.build.outputs(node)
        if not isinstance(found, tuple):
            assert isinstance(rows.dim, int)
            return Lazy(found, path, rows.dim, rows.merged)
        dims = (rows.dim,) * len(found) if isinstance(rows.dim, int) else rows.dim
        return tuple(
            None if x is None or dim is None else Lazy(x, path, dim, rows.merged)
            for x, dim in zip(found, dims, strict=True)
        )

    def at_rows(self, call: Call, row_call: RowCall, rows: Rows) -> fx.Node:
        """The call on the nodes of its operands."""
        args = rows.args if rows.target else {**row_call.args, **rows.args}
        first = row_call.operands()[0]

        def node(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                if any(n is ROWS for n in x):
                    return self.sizes(list(x), first, rows.merged)
                return [node(n) for n in x]
            return x.node if isinstance(x, Operand) else x

        return self.emit(rows.target or call.target, {name: node(x) for name, x in args.items()})

    def sizes(self, sizes: list[Any], x: Operand, merged: Merged) -> list[Any]:
        """A list of sizes with `ROWS` in it: -1 where nothing can be ambiguous."""
        at = next(i for i, n in enumerate(sizes) if n is ROWS)
        rest = sizes[:at] + sizes[at + 1 :]
        rows: Any = -1
        if any(not isinstance(n, int) or n == 0 for n in rest):
            rows = self.build.size(x.node, x.dim)
            rows = self.build.divided(rows, x.merged.outer * x.merged.inner)
            rows = self.build.times(rows, merged.outer * merged.inner)
        return [*sizes[:at], rows, *sizes[at + 1 :]]

    def distributed(self, call: Call) -> Any:
        """The op part by part, if the dim of its operands' concatenation is a batch dim to it."""
        rule = RULES.get(call.packet)
        cats = [x for x in call.values() if isinstance(x, Cat)]
        if rule is None or not cats or isinstance(call.out, (tuple, list)):
            return None
        first = cats[0]
        alike = [x for x in cats if x.widths == first.widths]

        def operand(value: Value) -> Any:
            if any(value is x for x in alike):
                assert isinstance(value, Cat)
                return Operand(self.dense(value), value.dim)
            return self.dense(value)

        row_call = RowCall(swapped_args(call.args, operand), call.out, self.fine_shape(call))
        rows = rule(row_call)
        if rows is None or not isinstance(rows.dim, int) or rows.merged.outer != 1:
            return None
        target, args = call.target, call.args
        if rows.target:
            target = rows.target
            args = {n: first if isinstance(x, Operand) else x for n, x in rows.args.items()}
        parts = []
        for i, width in enumerate(first.widths):
            own = {n: self._part(x, alike, i, width * rows.merged.inner) for n, x in args.items()}
            parts.append(self.apply_bound(target, bind(target, (), own)))
        if not any(isinstance(x, (Lazy, Cat)) for x in parts):
            return None
        self.done = ("split", ())
        return Cat(tuple(parts), tuple(w * rows.merged.inner for w in first.widths), rows.dim)

    def _part(self, x: Any, alike: list[Cat], i: int, width: int) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._part(n, alike, i, width) for n in x]
        if x is ROWS:
            return width
        return x.parts[i] if isinstance(x, Cat) and any(x is cat for cat in alike) else x

    def fine_shape(self, call: Call) -> torch.Size:
        """Of the first tensor argument, in the original."""
        return self.shape(call.values()[0])

    def shape(self, value: Value) -> torch.Size:
        """Of a value, on fine rows."""
        sizes: torch.Size = self.like(value).shape
        return sizes

    def like(self, value: Value) -> Any:
        """A fake tensor as the model has it; nothing is gathered for it."""
        if isinstance(value, Later):
            return value.out
        plain = self.plain(value)
        if isinstance(plain, Cat):
            with self.build.fake:
                return torch.cat([self.like(x) for x in plain.parts], plain.dim)
        x = plain.node.meta["val"]
        if isinstance(plain, Dense):
            return x
        rows = shape(plain.path[0].index)[0]
        sizes = list(x.shape)
        sizes[plain.dim] = rows * (plain.merged.outer * plain.merged.inner)
        with self.build.fake:
            return x.new_empty(sizes)

    def plain(self, value: Value) -> Dense | Lazy | Cat:
        """A map as the tensor that it is, and what was put off as its result."""
        if isinstance(value, Later):
            done = self.done
            found: Dense = self.kept(Call(value.target, value.args, value.out))
            self.done = done
            return found
        if not isinstance(value, Index):
            return value
        *near, last = value.path
        node = last.index
        if value.dtype not in (None, node.meta["val"].dtype):
            node = self.build.call(aten.to.dtype, node, value.dtype)
        return Lazy(node, tuple(near), 0) if near else Dense(node)

    def whole(self, path: Path) -> Map:
        """A path as one map, perhaps without its inverse."""
        first, last = path[0], path[-1]
        if len(path) == 1:
            return first
        known = self.between.get((first.fine, last.coarse))
        live = (first.live[0], last.live[1]) if first.live and last.live else None
        return known or Map(
            describe(path), first.fine, last.coarse, self.build.compose(path), live=live
        )

    def merged(self, path: Path, rows: fx.Node | int) -> Map:
        """A path as one map with its inverse, to `rows` rows."""
        known = self.maps.get(path)
        if known is None:
            single = self.whole(path)
            offsets, order = self.build.inverse(single, rows)
            known = replace(single, offsets=offsets, order=order)
            self.maps[path] = known
        return known

    def at(self, value: Value, depth: int) -> Lazy:
        """The value on the rows that the first `depth` maps of its path lead to."""
        plain = self.plain(value)
        if isinstance(plain, Cat):
            parts = [self.at(part, depth) for part in plain.parts]
            node = self.build.call(aten.cat.default, [x.node for x in parts], plain.dim)
            return Lazy(node, parts[0].path, parts[0].dim, parts[0].merged)
        assert isinstance(plain, Lazy)
        node = self.build.gather(plain.node, plain.path[depth:], plain.dim, plain.merged)
        return Lazy(node, plain.path[:depth], plain.dim, plain.merged)

    def dense(self, value: Value) -> fx.Node:
        """The value as the model has it."""
        plain = self.plain(value)
        if isinstance(plain, Dense):
            return plain.node
        if isinstance(plain, Lazy):
            return self.build.gather(plain.node, plain.path, plain.dim, plain.merged)
        path = path_of(plain)
        if path:
            return self.dense(self.at(plain, len(path)))
        return self.build.call(aten.cat.default, [self.dense(x) for x in plain.parts], plain.dim)

    def emit(self, target: Any, args: dict[str, Any]) -> fx.Node:
        """A call by names."""
        positional, named = arranged(target, args)
        return self.build.call(target, *positional, **named)


def path_of(value: Value) -> Path:
    """The path that a value is lazy along; what its parts share."""
    if isinstance(value, Lazy):
        return value.path
    if isinstance(value, Cat):
        paths = [path_of(x) for x in value.parts]
        return common(paths) if _aligned(value) else ()
    return ()


def _aligned(cat: Cat) -> bool:
    """Whether the parts, all of them lazy, have their rows in one dim."""
    places = set()
    for part in cat.parts:
        if isinstance(part, Cat):
            if not _aligned(part):
                return False
            part = _first(part)
        if not isinstance(part, Lazy):
            return False
        places.add((part.dim, part.merged))
    return len(places) == 1


def _first(cat: Cat) -> Value:
    part = cat.parts[0]
    return _first(part) if isinstance(part, Cat) else part
