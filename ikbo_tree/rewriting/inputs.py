"""What the caller declares of a model's inputs, and random inputs that keep to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.tree import BroadcastTree

TREE = "tree"
"""The name of the tree that a rewritten compact model takes."""


@dataclass(frozen=True)
class Declared:
    """The declarations of one rewrite.

    Attributes:
        example: the model's inputs by name, in the order of its signature.
        levels: the level of dim 0 of each input that has rows.
        maps: for each input that is a map, (fine, coarse).
        counts: for each input with the number of children, (coarse, fine).
        compact: inputs that arrive already broadcast: the level they belong to.
        tree: name of the input that is a tree, if there is one.
    """

    example: dict[str, Any]
    levels: dict[str, str]
    maps: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: dict[str, tuple[str, str]] = field(default_factory=dict)
    compact: dict[str, str] = field(default_factory=dict)
    tree: str | None = None

    @property
    def batches(self) -> dict[str, str]:
        """The level that dim 0 of each tensor counts rows of, maps and counts among them."""
        return {
            **{name: self.compact.get(name, level) for name, level in self.levels.items()},
            **{name: fine for name, (fine, _) in self.maps.items()},
            **{name: coarse for name, (coarse, _) in self.counts.items()},
        }

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All (fine, coarse) that maps or counts describe."""
        found = list(self.maps.values()) + [(f, c) for c, f in self.counts.values()]
        return list(dict.fromkeys(found))

    def all_levels(self) -> list[str]:
        """Every level, coarse first."""
        if self.tree is not None:
            tree: BroadcastTree = self.example[self.tree]
            return list(tree.levels)
        names = list(dict.fromkeys(self.batches.values()))
        names += [x for pair in self.pairs for x in pair if x not in names]
        ordered: list[str] = []

        def visit(level: str) -> None:
            if level not in ordered:
                for fine, coarse in self.pairs:
                    if fine == level:
                        visit(coarse)
                ordered.append(level)

        for name in names:
            visit(name)
        return ordered

    def parents(self, level: str) -> list[str]:
        """The levels directly above: reached by a map that no two others make up."""
        above = [c for f, c in self.pairs if f == level]
        return [c for c in above if not any((m, c) in self.pairs for m in above if m != c)]


def declared(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    levels: Mapping[str, str],
    broadcasts: Mapping[str, tuple[str, str]],
    counts: Mapping[str, tuple[str, str]],
    compact: Mapping[str, str],
    tree: BroadcastTree | None,
) -> Declared:
    """Checks and orders what the caller says.

    Raises:
        TreeError: a name that is no input of the model; an input that is declared twice, or with
            another number of rows than its level has elsewhere.
    """
    signature = inspect.signature(model.forward)
    if isinstance(example_inputs, Mapping):
        bound = signature.bind(**example_inputs)
    else:
        bound = signature.bind(*example_inputs)
    example = dict(bound.arguments)
    for argument, names in (
        ("levels", levels), ("broadcasts", broadcasts), ("counts", counts), ("compact", compact),
    ):  # fmt: skip
        for name in names:
            if name not in example:
                raise TreeError(argument, f"must name inputs of {list(example)}", repr(name))
    twice = [n for n in example if (n in levels) + (n in broadcasts) + (n in counts) > 1]
    if twice:
        raise TreeError("levels", "must not name a map or counts", repr(twice[0]))
    for name in compact:
        if name not in levels:
            raise TreeError("compact", "must name inputs that are in levels", repr(name))
    trees = [n for n, x in example.items() if isinstance(x, BroadcastTree)]
    found = Declared(
        example, dict(levels), dict(broadcasts), dict(counts), dict(compact),
        trees[0] if trees else None,
    )  # fmt: skip
    if compact:
        found = _compacted(found, tree)
    _check_rows(found)
    return found


def _compacted(given: Declared, tree: BroadcastTree | None) -> Declared:
    """With the inputs at their own levels, and the tree as one more."""
    (fine,) = {given.levels[name] for name in given.compact} or {""}
    if tree is None:
        above = [x for x in dict.fromkeys(given.compact.values()) if x != fine]
        ratios = {level: [2] * 2**i for i, level in enumerate([*above[1:], fine])}
        tree = BroadcastTree.from_counts(ratios, root=above[0]) if above else None
    if tree is None or fine not in tree.levels:
        raise TreeError("compact", f"must lead to a tree that has the level {fine!r}", str(tree))
    example = dict(given.example)
    for name, level in given.compact.items():
        x = example[name]
        rows = torch.arange(tree.rows(level)).remainder(max(1, x.shape[0]))
        example[name] = x[rows]
    for name, level in given.levels.items():
        if name not in given.compact:
            rows = torch.arange(tree.rows(level)).remainder(max(1, example[name].shape[0]))
            example[name] = example[name][rows]
    device = example[next(iter(given.compact))].device
    example[TREE] = tree if tree.device == device else tree.to(device)
    return Declared(example, given.levels, given.maps, given.counts, given.compact, TREE)


def _check_rows(found: Declared) -> None:
    rows: dict[str, tuple[int, str]] = {}
    for name, level in found.batches.items():
        x = found.example[name]
        if not isinstance(x, Tensor) or x.dim() == 0:
            raise TreeError(name, "must be a tensor with rows in dim 0", type(x).__name__)
        n, other = rows.setdefault(level, (x.shape[0], name))
        if x.shape[0] != n:
            rule = f"must have the {n} rows of level {level!r} that {other} has"
            raise TreeError(name, rule, f"{x.shape[0]} rows")


def random_inputs(
    given: Declared, rows: Mapping[str, int], seed: int, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Inputs like the example's, with other rows and values.

    Floats are normal with the example's mean and deviation; integers and booleans are drawn, entry
    by entry, from the example's rows; maps are random, and compose as a tree's do.

    Args:
        given: the declarations.
        rows: of each level.
        seed: of everything.
        dtype: of floats; None: the example's.
    """
    generator = torch.Generator().manual_seed(seed)
    maps = _random_maps(given, rows, generator)
    found: dict[str, Any] = {}
    for name, x in given.example.items():
        if isinstance(x, BroadcastTree):
            found[name] = _tree_like(x, rows).to(x.device)
        elif name in given.maps:
            found[name] = maps[given.maps[name]].to(x.dtype)
        elif name in given.counts:
            coarse, fine = given.counts[name]
            counts = torch.bincount(maps[fine, coarse], minlength=rows[coarse])
            found[name] = counts.to(x.dtype)
        elif isinstance(x, Tensor):
            level = given.batches.get(name)
            shape = x.shape if level is None else (rows[level], *x.shape[1:])
            found[name] = _like(x, tuple(shape), generator, dtype) if level else _cast(x, dtype)
        else:
            found[name] = x
        if isinstance(x, Tensor):
            found[name] = found[name].to(x.device)
    return found


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _like(
    x: Tensor, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype | None
) -> Tensor:
    if x.is_floating_point():
        wide = x.detach().double()
        mean = float(wide.mean()) if x.numel() else 0.0
        deviation = float(wide.std()) if x.numel() > 1 else 1.0
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (values * (deviation or 1.0) + mean).to(dtype or x.dtype)
    if x.shape[0] == 0:
        return x.new_zeros(shape)
    chosen = torch.randint(0, x.shape[0], (shape[0],), generator=generator)
    return x[chosen.to(x.device)]


def _random_maps(
    given: Declared, rows: Mapping[str, int], generator: torch.Generator
) -> dict[tuple[str, str], Tensor]:
    """Sorted where counts describe them or a tree wants it, else in any order."""
    if given.tree is not None:
        return {}
    in_order = bool(given.counts)
    maps: dict[tuple[str, str], Tensor] = {}
    for level in given.all_levels():
        for coarse in given.parents(level):
            index = torch.randint(0, max(1, rows[coarse]), (rows[level],), generator=generator)
            if rows[level] == rows[coarse]:
                index = torch.randperm(rows[coarse], generator=generator)
            maps[level, coarse] = index.sort().values if in_order else index
            for fine, far in list(maps):
                if fine == coarse:
                    maps[level, far] = maps[coarse, far][maps[level, coarse]]
    return maps


def _tree_like(tree: BroadcastTree, rows: Mapping[str, int]) -> BroadcastTree:
    """A tree of the same levels with so many rows, its maps sorted."""
    structure = tree.structure
    parents = {}
    for i, level in enumerate(tree.levels[1:], start=1):
        above = tree.levels[structure.parent[i]]
        generator = torch.Generator().manual_seed(rows[level] * 31 + rows[above])
        index = torch.randint(0, max(1, rows[above]), (rows[level],), generator=generator)
        parents[level] = index.sort().values.numpy()
    under = {
        level: tree.levels[structure.parent[i]]
        for i, level in enumerate(tree.levels)
        if i and structure.parent[i] != i - 1
    }
    return BroadcastTree.from_parents(
        parents, root=tree.levels[0], root_rows=rows[tree.levels[0]], under=under or None
    )
