"""The pass over a captured graph: every node becomes a Value, and the new graph is written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.rewriting import (  # noqa: F401  register their rules
    attention,
    bags,
    blocks,
    gathers,
    norms,
    splitting,
)
from ikbo_tree.rewriting.arguments import VALUES
from ikbo_tree.rewriting.builder import Builder, aten
from ikbo_tree.rewriting.capacity import Capacity
from ikbo_tree.rewriting.capture import Captured
from ikbo_tree.rewriting.engine import Engine, path_of
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.lineage import Lineage, Mixture, gives_tensors, starts
from ikbo_tree.rewriting.product import flat_module, product
from ikbo_tree.rewriting.refusals import source
from ikbo_tree.rewriting.report import Op, Report, Step
from ikbo_tree.rewriting.values import Dense, Index, Map, Path, describe, shape
from ikbo_tree.tree import BroadcastTree

_DROPPED = (
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    aten._assert_tensor_metadata.default,
)
"""What export writes down of sizes; ops on tensors of other sizes raise by themselves."""


_CASTS = (aten.to.dtype, aten._to_copy.default)


class Rewriting:
    """One pass over one graph.

    Args:
        captured: the original.
        given: the declarations.
        left: names of nodes that stay where the model has them.
        reduces: whether rows are fewer at a path's end; elsewhere nothing is put off.

    Attributes:
        env: what became of each original node.
        report: what was done.
        inputs: those of the new graph, by those of the original.
        offsets: maps of the tree by the original's inputs that are their offsets.
    """

    def __init__(
        self,
        captured: Captured,
        given: Declared,
        left: frozenset[str] = frozenset(),
        reduces: Callable[[Path], bool] = lambda path: True,
    ) -> None:
        self.captured = captured
        self.given = given
        self.left = left
        self.graph = fx.Graph()
        self.graph._codegen = captured.module.graph._codegen
        self.env: dict[fx.Node, Any] = {}
        self.report = Report(given)
        fake = next(
            n.meta["val"].fake_mode
            for n in captured.module.graph.nodes
            if isinstance(n.meta.get("val"), torch._subclasses.FakeTensor)
        )
        # Nothing that the pass asks about sizes may make them constants.
        fake.shape_env.freeze()
        self.build = Builder(self.graph, fake)
        self.engine = Engine(self.build, reduces)
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.offsets: dict[fx.Node, Map] = {}

    def run(self) -> None:
        """Interprets every node."""
        nodes = list(self.captured.module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.inputs[node] = self.graph.node_copy(node)
                self.env[node] = _plain(self.inputs[node])
                if isinstance(self.env[node], Dense):
                    self.build.enter(self.inputs[node])
        self._enter()
        self._declare()
        for node in nodes:
            if node.op == "get_attr":
                self.env[node] = _plain(self.graph.node_copy(node))
            elif node.op == "call_function" and node.target not in _DROPPED:
                self.build.origin = node
                self.env[node] = self._call(node)
            elif node.op == "output":
                self.build.origin = None
                self.graph.output(self._result(node.args[0]))
        for name, node in self.captured.placeholders.items():
            fixed = name in self.given.batches and isinstance(shape(node)[0], int)
            if fixed and self.captured.any_rows:
                raise AssertionError(f"the rows of {name} became a constant")

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = pytree.tree_map_only(fx.Node, self.env.__getitem__, (node.args, node.kwargs))
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        if not isinstance(node.target, torch._ops.OpOverload):
            plain = [self.engine.dense(x) if isinstance(x, VALUES) else x for x in args]
            return self.build.call(node.target, *plain, **kwargs)
        run = self.engine.leave if node.name in self.left else self.engine.run
        found = run(node.target, args, kwargs, node.meta["val"])
        self._note_counts(node, found)
        self.report.steps.append(Step.of(node, self.engine.done, path_of_any(found)))
        return found

    def _note_counts(self, node: fx.Node, found: Any) -> None:
        """Whether a value is the numbers of children by a tree's offsets."""
        if node.target is aten.diff.default:
            offsets = node.args[0]
            step = self.offsets.get(offsets) if isinstance(offsets, fx.Node) else None
        elif node.target in _CASTS and not node.meta["val"].is_floating_point():
            read = node.args[0]
            before = self.env.get(read) if isinstance(read, fx.Node) else None
            step = self.engine.counts.get(before.node) if isinstance(before, Dense) else None
        else:
            return
        if step is not None and isinstance(found, Dense):
            self.engine.counts[found.node] = step

    def _result(self, value: Any) -> Any:
        """The outputs, nothing put off."""

        def dense(node: fx.Node) -> Any:
            found = self.env[node]
            return self.engine.dense(found) if isinstance(found, VALUES) else found

        found = fx.node.map_arg(value, dense)
        if not self.engine.live:
            return found
        lineage = self.traced()
        capacity = Capacity(self.build, self.engine.live)
        return fx.node.map_arg(found, lambda n: capacity.leaving(n, lineage.places[n]))

    def traced(self) -> Lineage:
        """The levels of the new graph's values."""
        nodes = self.captured.placeholders
        known = starts(self.given, {name: self.inputs[node] for name, node in nodes.items()})
        return Lineage(known, self.given.all_levels()).read(self.graph.nodes)

    def _enter(self) -> None:
        """What a tree with capacity says of the inputs' rows."""
        given, nodes = self.given, self.captured.placeholders
        if given.tree is None or not given.padded:
            return
        counts = self.inputs[nodes[f"{given.tree}.0"]]
        for i, level in enumerate(given.example[given.tree].levels):
            self.engine.live[level] = self.build.call(aten.slice.Tensor, counts, 0, i, i + 1)
        capacity = Capacity(self.build, self.engine.live)
        for name, level in given.batches.items():
            linked = name in given.maps or name in given.counts
            x = capacity.entering(self.inputs[nodes[name]], level, map_or_counts=linked)
            self.env[nodes[name]] = Dense(x)

    def _declare(self) -> None:
        """Turns the inputs that are maps into maps."""
        given, nodes = self.given, self.captured.placeholders
        known: dict[tuple[str, str], Map] = {}
        for name, (fine, coarse) in given.maps.items():
            node = self.env[nodes[name]].node
            if len(shape(node)) != 1:
                raise TreeError(f'broadcasts["{name}"]', "must be a vector", str(list(shape(node))))
            step = known.setdefault((fine, coarse), Map(f"{fine}->{coarse}", fine, coarse, node))
            if step.index is not node:
                self._assert_equal(node, step.index, name)
            self.env[nodes[name]] = Index((step,))
        for name, (coarse, fine) in given.counts.items():
            node = self.env[nodes[name]].node
            rows = self._size(fine)
            index = self.build.call(aten.repeat_interleave.Tensor, node, output_size=rows)
            ends = self.build.call(aten.cumsum.default, node, 0)
            offsets = self.build.int32(self.build.call(aten.constant_pad_nd.default, ends, [1, 0]))
            step = Map(f"{fine}->{coarse}", fine, coarse, index, offsets)
            self.engine.counts[node] = known.setdefault((fine, coarse), step)
        if given.tree is not None:
            self._declare_tree(given.tree, known)
        for name, (fine, coarse) in given.maps.items():
            path = _through(fine, coarse, known)
            if len(path) > 1:
                direct = self.env[nodes[name]].path[0].index
                self._assert_equal(direct, self.build.compose(path), name)
                self.env[nodes[name]] = Index(path, direct.meta["val"].dtype)

    def _declare_tree(self, name: str, known: dict[tuple[str, str], Map]) -> None:
        """The fields of a tree, in the order of `tree.schema`."""
        tree: BroadcastTree = self.given.example[name]
        nodes = self.captured.placeholders
        fields = {
            i: nodes[f"{name}.{i}"] for i in range(len(tree._fields)) if f"{name}.{i}" in nodes
        }
        places = []
        at = 1
        for fine, coarse in tree.structure.pairs:
            f, c = tree.levels[fine], tree.levels[coarse]
            many = 2 if tree._schema.sorted else 3
            index, offsets, *order = (self.env[fields[at + i]].node for i in range(many))
            live = (self.engine.live[f], self.engine.live[c]) if self.engine.live else None
            step = Map(f"{f}->{c}", f, c, index, offsets, order[0] if order else None, live)
            known[f, c] = step
            self.offsets[fields[at + 1]] = step
            self.engine.between[f, c] = step
            places.append((fields[at], f, c, index))
            at += many
        for field, f, c, index in places:
            self.env[field] = Index(_through(f, c, known), index.meta["val"].dtype)

    def _size(self, level: str) -> fx.Node | int:
        for name, other in self.given.batches.items():
            if other == level and name in self.captured.placeholders:
                node = self.env[self.captured.placeholders[name]]
                if isinstance(node, Dense):
                    return self.build.size(node.node, 0)
        raise AssertionError(f"no input has the rows of level {level!r}")

    def _assert_equal(self, a: fx.Node, b: fx.Node, name: str) -> None:
        call = self.build.call
        same = call(aten.all.default, call(aten.eq.Tensor, a, b))
        message = f"input {name!r} must agree with the other maps between its levels"
        node = self.graph.call_function(aten._assert_async.msg, (same, message))
        node.meta["val"] = None

    def finished(self) -> nn.Module:
        """The new model, without what nothing uses."""
        self._clean()
        self._report_levels()
        return product(self.captured, self.graph, self.given)

    def _report_levels(self) -> None:
        """Every op's level, in the report and as `meta["custom"]`, which torch.export keeps."""
        lineage = self.traced()
        self.report.graph = self.graph
        for node in self.graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload) or not gives_tensors(node):
                continue
            level = lineage.level(node)
            together = isinstance(lineage.places[node], Mixture)
            reads, line = tuple(lineage.reads(node)), source(node)
            self.report.ops.append(Op(node.name, str(node.target), level, reads, together, line))
            if level is not None:
                node.meta["custom"] = {**node.meta.get("custom", {}), "level": level}

    def flat(self) -> fx.GraphModule:
        """The same of tensors by position, results in a tuple, as compilers pass graphs on."""
        self._clean()
        for node in self.graph.nodes:
            # Values of this trace, whose symbols are not those of the next one.
            for name in ("val", "tensor_meta", "example_value"):
                node.meta.pop(name, None)
        return flat_module(self.captured, self.graph)

    def _clean(self) -> None:
        self.graph.eliminate_dead_code()
        self.graph.lint()


def _plain(node: fx.Node) -> Any:
    return Dense(node) if isinstance(node.meta.get("val"), torch.Tensor) else node


def _through(fine: str, coarse: str, known: Mapping[tuple[str, str], Map]) -> Path:
    """The path of most steps between two levels: values then stop at every level between."""
    best: Path = (known[fine, coarse],)
    for f, middle in known:
        if f == fine and middle != coarse and (middle, coarse) in known:
            longer = (*_through(f, middle, known), *_through(middle, coarse, known))
            if len(longer) > len(best):
                best = longer
    return best


def path_of_any(value: Any) -> str:
    """The levels that a result is lazy along, for reports."""
    if isinstance(value, tuple):
        value = next((x for x in value if x is not None), None)
    if isinstance(value, Index):
        return describe(value.path)
    return describe(path_of(value)) if isinstance(value, VALUES) else ""
