"""Trees from trees: several as one, and a part of one. Maps are known to be in range here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.build import loops, pack_parents
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.integers import LIMIT, as_integers, first
from ikbo_tree.mapping.layout import Allocate, Int32, Packed


def concat(
    trees: Sequence[Packed],
    *,
    capacity: Sequence[int | None] | None = None,
    allocate: Allocate | None = None,
) -> Packed:
    """One tree of the live rows of several, each level's rows one tree after the other.

    The first row of tree `t` at a level is the sum of the rows of the trees before it.

    Args:
        trees: at least one, all of one structure; sorted or not, of any capacity.
        capacity: allocated rows of each level; None, of all or of one: as many as there are rows.
        allocate: gives the buffer; None: numpy does.

    Raises:
        TreeError: no tree, different structures, more than 2^31 - 1 rows in a level, a capacity
            below the rows.
    """
    if not trees:
        raise TreeError("trees", "must hold at least one tree", "none")
    structure = trees[0].structure
    for i, tree in enumerate(trees):
        if tree.structure != structure:
            rule = f"must have the levels of trees[0], {structure.levels} below {structure.parent}"
            got = f"{tree.structure.levels} below {tree.structure.parent}"
            raise TreeError(f"trees[{i}]", rule, got)
    rows = np.array([tree.rows for tree in trees], dtype=np.int64)
    totals = rows.sum(axis=0).tolist()
    for level, total in zip(structure.levels, totals, strict=True):
        if total > LIMIT:
            raise TreeError("trees", "must have at most 2^31 - 1 rows", f"{total} of {level!r}")
    parents = np.empty(sum(totals[1:]), dtype=np.int32)
    loops().merge_parents(
        structure.pair_table,
        len(totals),
        np.array([2 if tree.sorted else 3 for tree in trees]),
        rows,
        np.array([tree.capacity for tree in trees], dtype=np.int64),
        np.concatenate([tree.buffer for tree in trees]),
        parents,
    )
    split = np.split(parents, np.cumsum(totals[1:])[:-1]) if len(totals) > 1 else []
    return pack_parents(structure, split, totals[0], capacity=capacity, allocate=allocate)


def select(
    tree: Packed, level: int, rows: Any, *, argument: str = "rows", allocate: Allocate | None = None
) -> tuple[Packed, list[Int32]]:
    """The part of a tree that belongs to some rows of one level.

    Kept are those rows, in the given order; of the levels above, the rows with a kept row below, in
    their old order; and everything below any kept row (in branches that hang off a kept ancestor,
    too), grouped in the order of the new parents and in the old order below one parent.

    Args:
        tree: the tree; dead rows stay behind.
        level: position of the level.
        rows: distinct rows of it, any integer dtype.
        argument: the name of `rows` in the caller's words.
        allocate: gives the buffer; None: numpy does.

    Returns:
        The tree, and for each level int32 [its rows]: the row that each had before.

    Raises:
        TreeError: rows of a wrong dtype or rank, out of range, or twice.
    """
    structure = tree.structure
    origins: list[NDArray[Any]] = [_NONE] * len(structure.levels)
    origins[level] = _checked_rows(argument, rows, tree.rows[level], structure.levels[level])
    parents: list[NDArray[Any]] = [_NONE] * len(structure.levels)
    below = level
    for above in structure.lineage[level]:
        old = tree.maps(below, above).index[origins[below]]
        origins[above], parents[below] = np.unique(old, return_inverse=True)
        below = above
    for i in range(1, len(structure.levels)):
        if i != level and i not in structure.lineage[level]:
            origins[i], parents[i] = _children(tree, i, origins[structure.parent[i]])
    kept = pack_parents(structure, parents[1:], origins[0].size, allocate=allocate)
    return kept, [origin.astype(np.int32, copy=False) for origin in origins]


_NONE = np.empty(0, dtype=np.int32)


def _checked_rows(argument: str, rows: Any, live: int, level: str) -> NDArray[Any]:
    array = as_integers(argument, rows)
    at = first((array < 0) | (array >= live))
    if at >= 0:
        rule = f"must be rows of {level!r}, from 0 to {live - 1}"
        if not live:
            rule = f"must be empty: {level!r} has no rows"
        raise TreeError(argument, rule, f"{array[at]} at position {at}")
    seen = np.full(live, -1, dtype=np.int64)
    seen[array[::-1]] = np.arange(array.size - 1, -1, -1)
    at = first(seen[array] != np.arange(array.size))
    if at >= 0:
        got = f"{array[at]} at positions {seen[array[at]]} and {at}"
        raise TreeError(argument, "must be distinct", got)
    return array


def _children(tree: Packed, level: int, parents: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows of a level below some rows of its parent level, and the place of each parent."""
    _, offsets, order = tree.maps(level, tree.structure.parent[level])
    starts = offsets[parents].astype(np.int64)
    counts = offsets[parents + 1] - starts
    ends = np.cumsum(counts)
    places = np.repeat(starts - (ends - counts), counts)
    places += np.arange(places.size)
    rows = places if order is None else order[places]
    return rows, np.repeat(np.arange(parents.size), counts)
