"""What the caller declares of a model's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.rewriting.ranges import Range, checked
from ikbo_tree.tree import BroadcastTree

TREE = "tree"
"""The name of the tree that a rewritten model takes where it takes one of its own."""


class Replaced(NamedTuple):
    """An input of the original that a rewritten model takes from its tree.

    Attributes:
        kind: "map" or "counts".
        fine: the finer level.
        coarse: the coarser one.
        dtype: of the input.
    """

    kind: str
    fine: str
    coarse: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Declared:
    """The declarations of one rewrite.

    Attributes:
        example: the inputs by name, in the order of the model's signature; of those in `compact`
            the rows of their own level, none of those in `replaced`, and the tree.
        levels: the level of dim 0 of each input that has rows.
        maps: for each input that is a map, (fine, coarse).
        counts: for each input with the number of children, (coarse, fine).
        compact: inputs that arrive already broadcast: the level they belong to.
        tree: name of the input that is a tree, if there is one.
        replaced: inputs of the original that are no inputs any more, since the tree has them.
        ranges: how many rows levels may have, where that is known.
    """

    example: dict[str, Any]
    levels: dict[str, str]
    maps: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: dict[str, tuple[str, str]] = field(default_factory=dict)
    compact: dict[str, str] = field(default_factory=dict)
    tree: str | None = None
    replaced: dict[str, Replaced] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)

    @property
    def wrapped(self) -> bool:
        """Whether the rewritten model has another signature, with a keyword `tree`."""
        return bool(self.compact or self.replaced)

    @property
    def padded(self) -> bool:
        """Whether there are rows beyond the live ones, whose counts are the tree's."""
        return self.tree is not None and bool(self.example[self.tree]._schema.padded)

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
        ordered: list[str] = []
        if self.tree is not None:
            tree: BroadcastTree = self.example[self.tree]
            ordered += tree.levels
        names = list(dict.fromkeys(self.batches.values()))
        names += [x for pair in self.pairs for x in pair if x not in names]

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
    rows: Mapping[str, Sequence[int]] | None = None,
) -> Declared:
    """Checks and orders what the caller says.

    Raises:
        TreeError: a name that is no input of the model; an input that is declared twice, or with
            another number of rows than its level has elsewhere; a tree that lacks a level.
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
    if tree is not None or compact:
        found = _on_tree(found, tree)
    _check_rows(found)
    return replace(found, ranges=checked(rows or {}, found.all_levels()))


def _on_tree(given: Declared, tree: BroadcastTree | None) -> Declared:
    """With a tree as one more input, maps that it has left out, the others at their own levels."""
    if given.tree is not None:
        raise TreeError("tree", "must not be given to a model that takes one", repr(given.tree))
    fine = {given.levels[name] for name in given.compact}
    if len(fine) > 1:
        raise TreeError("compact", "must name inputs of one level in levels", str(sorted(fine)))
    known = {} if tree is None else _replaced(given, tree)
    if tree is None:
        above = [x for x in dict.fromkeys(given.compact.values()) if x not in fine]
        if not above:
            raise TreeError("compact", "must name a level above that in levels", str(given.compact))
        ratios = {level: [2] * 2**i for i, level in enumerate([*above[1:], *fine])}
        tree = BroadcastTree.from_counts(ratios, root=above[0])
    for level in (*fine, *given.compact.values()):
        if level not in tree.levels:
            raise TreeError("tree", f"must have the level {level!r}", repr(tree))
    tensors = {n: x for n, x in given.example.items() if n not in known}
    own = {n: given.compact.get(n, level) for n, level in given.levels.items()}
    for name, level in own.items():
        if level in tree.levels:
            tensors[name] = _rows_of(tensors[name], tree.capacity(level))
    device = next((x.device for x in tensors.values() if isinstance(x, Tensor)), tree.device)
    maps, counts = (
        {n: pair for n, pair in pairs.items() if n not in known}
        for pairs in (given.maps, given.counts)
    )
    tensors[TREE] = tree if tree.device == device else tree.to(device)
    return Declared(tensors, given.levels, maps, counts, given.compact, TREE, known)


def _replaced(given: Declared, tree: BroadcastTree) -> dict[str, Replaced]:
    """The inputs that are maps and counts of a tree."""
    pairs = {name: ("map", *pair) for name, pair in given.maps.items()}
    pairs |= {name: ("counts", *pair[::-1]) for name, pair in given.counts.items()}
    found = {}
    for name, (kind, fine, coarse) in pairs.items():
        if fine in tree.levels and coarse in tree.levels:
            tree.route(fine, coarse)  # raises unless one lies above the other
            if kind == "counts" and not tree.is_sorted:
                raise TreeError("tree", f"must be sorted, since {name} is of counts", repr(tree))
            found[name] = Replaced(kind, fine, coarse, given.example[name].dtype)
    return found


def _rows_of(x: Any, rows: int) -> Any:
    """So many rows, those of the example again and again."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] == rows:
        return x
    if x.shape[0] == 0:
        return x.new_zeros((rows, *x.shape[1:]))
    return x[torch.arange(rows, device=x.device).remainder(x.shape[0])]


def _check_rows(found: Declared) -> None:
    rows: dict[str, tuple[int, str]] = {}
    if found.tree is not None:
        tree: BroadcastTree = found.example[found.tree]
        if tree._schema.positions:
            raise TreeError(found.tree, "must not come from padded requests", repr(tree))
        rows = {level: (tree.capacity(level), found.tree) for level in tree.levels}
    for name, level in found.batches.items():
        x = found.example[name]
        if not isinstance(x, Tensor) or x.dim() == 0:
            raise TreeError(name, "must be a tensor with rows in dim 0", type(x).__name__)
        n, other = rows.setdefault(level, (x.shape[0], name))
        if x.shape[0] != n:
            rule = f"must have the {n} rows of level {level!r} that {other} has"
            raise TreeError(name, rule, f"{x.shape[0]} rows")
