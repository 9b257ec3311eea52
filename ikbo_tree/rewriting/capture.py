"""A model as one graph of ATen ops, by torch.export, and the reasons why some cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ikbo_tree.rewriting.errors import RefusedError
from ikbo_tree.rewriting.inputs import TREE, Declared, random_inputs
from ikbo_tree.tree import BroadcastTree
from ikbo_tree.tree.schema import levels_below

_TORCH = str(Path(torch.__file__).parent)
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89)


@dataclass(frozen=True)
class Captured:
    """A model's graph.

    Attributes:
        module: ATen ops, parameters and buffers as attributes, the model's call convention.
        placeholders: flat names of its inputs in order: `user_x`, `tree.3`.
        any_rows: whether it holds for any numbers of rows.
    """

    module: fx.GraphModule
    placeholders: dict[str, fx.Node]
    any_rows: bool = True


class Compacted(nn.Module):
    """A model whose inputs come broadcast, taking them on their own levels, and a tree."""

    def __init__(self, model: nn.Module, given: Declared, fine: str) -> None:
        super().__init__()
        self.model = model
        self._compact = dict(given.compact)
        self._fine = fine
        signature = inspect.signature(model.forward)
        parameters = [p for n, p in signature.parameters.items() if n in given.example]
        keyword = inspect.Parameter(TREE, inspect.Parameter.KEYWORD_ONLY)
        compacted = self._forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return compacted(*args, **kwargs)

        forward.__signature__ = signature.replace(parameters=[*parameters, keyword])  # type: ignore[attr-defined]
        self.forward = forward

    def _forward(self, *args: Any, tree: BroadcastTree, **kwargs: Any) -> Any:
        names = list(inspect.signature(self.model.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, level in self._compact.items():
            if level != self._fine:
                given[name] = given[name].index_select(0, tree.ancestors(self._fine, of=level))
        return self.model(**given)


def capture(model: nn.Module, given: Declared) -> Captured:
    """Exports a model with one symbolic size a level.

    Raises:
        RefusedError: the model cannot become one graph, or not one that may be rewritten.
    """
    _refuse_training(model)
    rows = _rows(model, given)
    inputs = random_inputs(given, rows, seed=0)
    dims = {level: Dim(f"rows_{level}") for level in rows}
    dynamic = {name: _dynamic(given, name, x, dims) for name, x in inputs.items()}
    return exported(model, inputs, dynamic)


def exported(
    model: nn.Module, inputs: dict[str, Any], dynamic: dict[str, Any], *, any_rows: bool = True
) -> Captured:
    """Exports a model in evaluation mode.

    Args:
        model: it.
        inputs: by name.
        dynamic: the `dynamic_shapes` of `torch.export`.
        any_rows: as in `Captured`.
    """
    with _capturing():
        try:
            program = torch.export.export(
                model, (), kwargs=inputs, dynamic_shapes=dynamic, strict=False
            )
            program = program.run_decompositions({})
        except Exception as error:
            raise RefusedError(
                f"torch.export makes no graph of it: {type(error).__name__}: {error}"
            ) from error
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    for node in module.graph.nodes:
        _refuse_op(node)
    nodes = list(module.graph.find_nodes(op="placeholder"))
    return Captured(module, dict(zip(_flat_names(inputs), nodes, strict=True)), any_rows)


@contextmanager
def _capturing() -> Iterator[None]:
    """With attention as ops, not as one fused layer."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _rows(model: nn.Module, given: Declared) -> dict[str, int]:
    """Row counts that no other size of the model is equal to: equal ones become one symbol."""
    taken = {n for p in [*model.parameters(), *model.buffers()] for n in p.shape}
    for x in given.example.values():
        if isinstance(x, Tensor):
            taken |= set(x.shape[1:])
    free = [p for p in _PRIMES if p not in taken and p + 1 not in taken]
    levels = given.all_levels()
    if len(free) < len(levels):
        free = [10**4 + p for p in _PRIMES]
    return dict(zip(levels, free, strict=False))


def _dynamic(given: Declared, name: str, x: Any, dims: dict[str, Any]) -> Any:
    if isinstance(x, BroadcastTree):
        return _tree_dynamic(x, dims)
    level = given.batches.get(name)
    if level is None:
        return pytree.tree_map(lambda _: None, x)
    return {0: dims[level]}


def _tree_dynamic(tree: BroadcastTree, dims: dict[str, Any]) -> list[Any]:
    """In the order of `tree.schema`."""
    found: list[Any] = [None]
    levels = tree.levels
    for fine, coarse in tree.structure.pairs:
        found += [{0: dims[levels[fine]]}, {0: dims[levels[coarse]] + 1}]
        if not tree._schema.sorted:
            found.append({0: dims[levels[fine]]})
    if len(levels) == 1:
        found.append({0: dims[levels[0]]})
    for table in tree._schema.tables:
        found.append(None)
        for below in levels_below(tree.structure, table.of):
            fine_dim = dims[levels[below]]
            found += [{0: fine_dim}, None, {0: fine_dim}]
    return found


def _flat_names(inputs: dict[str, Any]) -> list[str]:
    names = []
    for name, x in inputs.items():
        leaves = pytree.tree_leaves(x)
        single = len(leaves) == 1 and leaves[0] is x
        names += [name] if single else [f"{name}.{i}" for i in range(len(leaves))]
    return names


def _refuse_training(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module.training and not isinstance(module, Compacted):
            where = f"its module {name!r} ({type(module).__name__})" if name else "the model"
            raise RefusedError(f"{where} is in training mode; call model.eval() first")


def _refuse_op(node: fx.Node) -> None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return
    why = None
    if torch.Tag.nondeterministic_seeded in target.tags and _draws(node):
        why = "draws random numbers, whose order a rewritten model would change"
    elif _in_training(node):
        why = "takes statistics of the batch, which mixes its rows and belongs to training"
    elif _drops_rows(node):
        why = "drops the rows' own dim where there is one row, so shapes would follow from the tree"
    elif target._schema.is_mutable and target.overloadpacket is not torch.ops.aten.batch_norm:
        why = "changes a tensor in place, in an order that the pass cannot keep"
    elif torch.Tag.data_dependent_output in target.tags:
        why = "makes a number of a tensor's values, which a graph for any tree cannot hold"
    elif (
        torch.Tag.dynamic_output_shape in target.tags
        and target.overloadpacket is not torch.ops.aten.repeat_interleave
        and free_unbacked_symbols(node.meta["val"])
    ):
        why = "gives a tensor whose size depends on values"
    if why is not None:
        raise RefusedError(f"{target.overloadpacket} {why}{source(node)}")


def _in_training(node: fx.Node) -> bool:
    if "batch_norm" not in str(node.target):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    if "training" not in names:
        return "no_training" not in str(node.target)
    at = names.index("training")
    return bool(node.args[at] if len(node.args) > at else node.kwargs.get("training", False))


def _drops_rows(node: fx.Node) -> bool:
    """Whether a squeeze meets a dim whose size is a number of rows."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target.overloadpacket is not torch.ops.aten.squeeze:
        return False
    x = node.args[0]
    assert isinstance(x, fx.Node)
    sizes = x.meta["val"].shape
    named: Any = node.args[1] if len(node.args) > 1 else range(len(sizes))
    dims = [named] if isinstance(named, int) else named
    return any(isinstance(sizes[d], torch.SymInt) for d in dims)


def _draws(node: fx.Node) -> bool:
    """Whether an op that may be random is: dropout is not where it is told not to."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, argument in enumerate(node.target._schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, None)
        value = argument.default_value if given is None else given
        if argument.name == "dropout_p":
            return bool(value != 0.0)
        if argument.name == "train":
            return value is not False
    return True


def source(node: fx.Node) -> str:
    """Where the model's source has the op, as the end of a sentence."""
    trace = (node.meta.get("stack_trace") or "").splitlines()
    found = [
        (line.strip().removeprefix("File "), code.strip())
        for line, code in pairwise(trace)
        if line.strip().startswith("File ")
    ]
    own = [x for x in found if f"{_TORCH}" not in x[0]] or found
    return f" ({own[-1][0]}: `{own[-1][1]}`)" if own else ""
