"""A model as one graph of ATen ops, by torch.export, and the reasons why some cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from ikbo_tree.rewriting import ranges
from ikbo_tree.rewriting.inputs import TREE, Declared
from ikbo_tree.rewriting.random_inputs import random_inputs
from ikbo_tree.rewriting.refusals import not_exported, refuse_op, refuse_training, refuse_writes
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


class Wrapped(nn.Module):
    """A model that takes a tree: inputs that come broadcast on their own levels, no maps."""

    def __init__(self, model: nn.Module, given: Declared) -> None:
        super().__init__()
        self.training = False  # the model's own mode stays as it is
        self.model = model
        self._given = given
        self._names = [name for name in given.example if name != TREE]
        signature = inspect.signature(model.forward)
        parameters = [signature.parameters[name] for name in self._names]
        keyword = inspect.Parameter(TREE, inspect.Parameter.KEYWORD_ONLY)
        wrapped = self._forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        forward.__signature__ = signature.replace(parameters=[*parameters, keyword])  # type: ignore[attr-defined]
        self.forward = forward

    def _forward(self, *args: Any, tree: BroadcastTree, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        for name, level in self._given.compact.items():
            fine = self._given.levels[name]
            if level != fine:
                given[name] = given[name].index_select(0, tree.ancestors(fine, of=level))
        for name, (kind, fine, coarse, dtype) in self._given.replaced.items():
            if kind == "map":
                given[name] = tree.ancestors(fine, of=coarse).to(dtype)
            else:
                given[name] = tree.offsets(fine, of=coarse).diff().to(dtype)
        return self.model(**given)


def capture(model: nn.Module, given: Declared) -> Captured:
    """Exports a model with one symbolic size a level.

    Raises:
        RefusedError: the model cannot become one graph, or not one that may be rewritten.
    """
    refuse_training(model.model if isinstance(model, Wrapped) else model)
    rows = _rows(model, given)
    inputs = random_inputs(given, rows, seed=0)
    return exported(model, inputs, dynamic_shapes(given, ranges.dims(rows, {})))


def dynamic_shapes(given: Declared, dims: Mapping[str, Any]) -> dict[str, Any]:
    """What `torch.export` calls so: for each input the dims that hold rows of a level."""
    return {name: _dynamic(given, name, x, dims) for name, x in given.example.items()}


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
            raise not_exported(error) from error
    refuse_writes(program)
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    for node in module.graph.nodes:
        refuse_op(node)
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


def _dynamic(given: Declared, name: str, x: Any, dims: Mapping[str, Any]) -> Any:
    if isinstance(x, BroadcastTree):
        return _tree_dynamic(x, dims)
    level = given.batches.get(name)
    if level is None:
        return pytree.tree_map(lambda _: None, x)
    return {0: dims[level]}


def _tree_dynamic(tree: BroadcastTree, dims: Mapping[str, Any]) -> list[Any]:
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
