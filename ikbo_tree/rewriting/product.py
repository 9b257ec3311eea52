"""The rewritten model as a module: with the original's call convention, or with a tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.rewriting.capture import Captured
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.tree import BroadcastTree

_MODEL = "model."


def product(captured: Captured, graph: fx.Graph, given: Declared) -> nn.Module:
    """The new graph as a module that shares the original's parameters, under their names.

    A model that takes a tree keeps them under `program.`: around the graph, which takes tensors,
    is a module that takes the tree apart, since tracers compare the static part of a pytree badly.
    """
    wrapped = given.wrapped
    root: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = _attribute(captured.module, str(node.target))
        if wrapped:
            node.target = str(node.target).removeprefix(_MODEL)
        root[str(node.target)] = value
    if given.tree is None:
        return _frozen(fx.GraphModule(root, graph, "Rewritten"))
    spec = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    graph.set_codegen(fx.graph.CodeGen())
    return _frozen(_on_trees(fx.GraphModule(root, graph, "Rewritten"), given, spec))


def flat_module(captured: Captured, graph: fx.Graph) -> fx.GraphModule:
    """The new graph as a module that takes its inputs by position."""
    targets = [str(node.target) for node in graph.find_nodes(op="get_attr")]
    graph.set_codegen(fx.graph.CodeGen())
    root = {target: _attribute(captured.module, target) for target in targets}
    return fx.GraphModule(root, graph, "Rewritten")


def _frozen(module: nn.Module) -> nn.Module:
    return module.train(False)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


class OnTrees(nn.Module):
    """A rewritten model that takes a tree; `forward` is written for its inputs.

    Attributes:
        program: takes the tensors, those of the tree at the tree's place.
    """

    def __init__(self, graph: fx.GraphModule, example: BroadcastTree, spec: Any) -> None:
        super().__init__()
        self.program = graph
        self._schema = example._schema
        self._example = repr(example)
        self._spec = spec

    def fields(self, tree: BroadcastTree) -> tuple[Tensor, ...]:
        """The tree's tensors.

        Raises:
            TreeError: a tree with other levels, unsorted where the example was sorted, or with a
                capacity where the example had none.
        """
        if not torch.compiler.is_compiling() and not self._takes(tree):
            rule = "must have the levels, order, capacity and tables of the one it was made for"
            raise TreeError("tree", f"{rule}, {self._example}", repr(tree))
        return tree._fields

    def run(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The program's results."""
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            # Node by node, so that an exported program's nodes have the levels of the graph's.
            with fx.traceback.preserve_node_meta():
                found: tuple[Any, ...] = fx.Interpreter(self.program).run(*tensors)
            return found
        return self.program(*tensors)  # type: ignore[no-any-return]

    def _takes(self, tree: BroadcastTree) -> bool:
        """A tree without spare rows is one with a capacity that it fills."""
        padded = tree._schema.padded or self._schema.padded
        return replace(tree._schema, padded=padded) == self._schema

    def structured(self, flat: tuple[Any, ...]) -> Any:
        """The result as the original gives it."""
        return flat[0] if self._spec.is_leaf() else pytree.tree_unflatten(list(flat), self._spec)


def _on_trees(graph: fx.GraphModule, given: Declared, spec: Any) -> OnTrees:
    """With a `forward` whose parameters are the inputs' names, so that tracers can read them."""
    assert given.tree is not None
    names = [*given.example]
    passed = [_passed(name, given) for name in names]
    listed = [n for n in names if n != given.tree or not given.wrapped]
    parameters = ", ".join(["self", *listed, *(["*", "tree"] if given.wrapped else [])])
    body = f"return self.structured(self.run({', '.join(passed)}))"
    code = f"def forward({parameters}):\n    {body}\n"
    scope: dict[str, Any] = {"leaves": pytree.tree_leaves}
    exec(compile(code, "<rewritten>", "exec"), scope)
    kind = type("RewrittenOnTrees", (OnTrees,), {"forward": scope["forward"]})
    made: OnTrees = kind(graph, given.example[given.tree], spec)
    return made


def _passed(name: str, given: Declared) -> str:
    if name == given.tree:
        return f"*self.fields({name})"
    return name if isinstance(given.example[name], Tensor) else f"*leaves({name})"
