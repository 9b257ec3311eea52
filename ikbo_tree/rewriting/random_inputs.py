"""Random inputs that keep to what the caller declares of a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.tree import BroadcastTree
from ikbo_tree.tree.schema import levels_below


def random_inputs(
    given: Declared,
    rows: Mapping[str, int],
    seed: int,
    dtype: torch.dtype | None = None,
    live: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Inputs like the example's, with other rows and values.

    Floats are normal with the example's mean and deviation; integers and booleans are drawn, entry
    by entry, from the example's rows; maps are random, and compose as a tree's do.

    Args:
        given: the declarations.
        rows: of each level.
        seed: of everything.
        dtype: of floats; None: the example's.
        live: the rows of each level that are live, for a tree with capacity; None: all.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    maps: dict[tuple[str, str], Tensor] = {}
    if given.tree is not None:
        tree = _tree_like(given.example[given.tree], rows, live or rows, generator)
        found[given.tree] = tree.to(given.example[given.tree].device)
        maps = _maps_of(tree)
    _add_random_maps(maps, given, rows, generator)
    for name, x in given.example.items():
        if name == given.tree:
            continue
        if name in given.maps:
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
    return {name: found[name] for name in given.example}


def with_and_without_spare_rows(
    given: Declared, capacity: Mapping[str, int], live: Mapping[str, int], seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Float64 inputs on a tree with capacity, spare rows NaN and out of range; the live rows alone.

    Args:
        given: the declarations, of a tree with capacity.
        capacity: rows of each level.
        live: of these the live ones.
        seed: of everything.
    """
    assert given.tree is not None
    whole = random_inputs(given, capacity, seed, torch.float64, live)
    spoilt, alone = dict(whole), dict(whole)
    for name, level in given.batches.items():
        x = whole[name].clone()
        x[live[level] :] = torch.nan if x.is_floating_point() else _largest(x.dtype)
        spoilt[name], alone[name] = x, whole[name][: live[level]]
    alone[given.tree] = _live_part(whole[given.tree], live)
    return spoilt, alone


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _live_part(tree: BroadcastTree, live: Mapping[str, int]) -> BroadcastTree:
    """The tree without spare rows, its schema the same."""
    fields, levels = list(tree._fields), tree.levels
    at = 1

    def cut(end: int) -> None:
        nonlocal at
        fields[at] = fields[at][:end]
        at += 1

    for fine, coarse in tree.structure.pairs:
        cut(live[levels[fine]])
        cut(live[levels[coarse]] + 1)
        if not tree.is_sorted:
            cut(live[levels[fine]])
    if len(levels) == 1:
        cut(live[levels[0]])
    for table in tree._schema.tables:
        at += 1
        for below in levels_below(tree.structure, table.of):
            cut(live[levels[below]])
            at += 1
            cut(live[levels[below]])
    return BroadcastTree._from_fields(tree._schema, tuple(fields))


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


def _add_random_maps(
    maps: dict[tuple[str, str], Tensor],
    given: Declared,
    rows: Mapping[str, int],
    generator: torch.Generator,
) -> None:
    """Those that are declared: in order where counts describe them, else in any."""
    in_order = bool(given.counts)
    for level in given.all_levels():
        for coarse in given.parents(level):
            if (level, coarse) not in maps:
                index = torch.randint(0, max(1, rows[coarse]), (rows[level],), generator=generator)
                if rows[level] == rows[coarse]:
                    index = torch.randperm(rows[coarse], generator=generator)
                maps[level, coarse] = index.sort().values if in_order else index
            for fine, far in list(maps):
                if fine == coarse:
                    maps.setdefault((level, far), maps[coarse, far][maps[level, coarse]])


def _maps_of(tree: BroadcastTree) -> dict[tuple[str, str], Tensor]:
    """From every level to every one above it."""
    structure = tree.structure
    return {
        (level, tree.levels[above]): tree.ancestors(level, of=tree.levels[above]).long()
        for i, level in enumerate(tree.levels)
        for above in structure.lineage[i]
    }


def _tree_like(
    tree: BroadcastTree,
    rows: Mapping[str, int],
    live: Mapping[str, int],
    generator: torch.Generator,
) -> BroadcastTree:
    """A tree of the same schema with so many rows, its maps in order if the other's are."""
    structure = tree.structure
    parents = {}
    for i, level in enumerate(tree.levels[1:], start=1):
        above = tree.levels[structure.parent[i]]
        index = torch.randint(0, max(1, live[above]), (live[level],), generator=generator)
        parents[level] = (index.sort().values if tree.is_sorted else index).numpy()
    under = {
        level: tree.levels[structure.parent[i]]
        for i, level in enumerate(tree.levels)
        if i and structure.parent[i] != i - 1
    }
    padded = tree._schema.padded
    root = tree.levels[0]
    made = BroadcastTree.from_parents(
        parents,
        root=root,
        root_rows=live[root],
        under=under or None,
        capacity={level: rows[level] for level in tree.levels} if padded else None,
    )
    if made.is_sorted and not tree.is_sorted:
        made = _with_orders(made)
    for table in tree.tables:
        of = tree.table_level(table)
        index = torch.randint(0, max(1, tree.rows(table)), (live[of],), generator=generator)
        size = tree.capacity(table) if padded else None
        made = made.with_table(table, of=of, index=index, rows=tree.rows(table), capacity=size)
    return made


def _with_orders(tree: BroadcastTree) -> BroadcastTree:
    """A sorted tree as one whose maps are in any order, which happen to be in order."""
    live, *maps = tree._fields
    fields = [live]
    for index, offsets in zip(maps[::2], maps[1::2], strict=True):
        order = torch.arange(index.shape[0], dtype=torch.int32).where(
            torch.arange(index.shape[0]) < offsets[-1], 0
        )
        fields += [index, offsets, order.to(torch.int32)]
    return BroadcastTree._from_fields(replace(tree._schema, sorted=False), tuple(fields))
