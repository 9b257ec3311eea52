"""Hypothesis strategies for trees; they need the extra `testing`.

    from hypothesis import given
    from ikbo_tree.testing.strategies import trees

    @given(trees(max_depth=3))
    def test_my_op(tree): ...

Counts are drawn as numbers, not from a seed, so that a failing tree shrinks to the smallest one
that fails: fewer levels, fewer rows, no table, no capacity, sorted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.extras import require
from ikbo_tree.tree import BroadcastTree

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

st: Any = require("hypothesis", "testing").strategies

LEVELS = ("user", "vendor", "item", "offer", "slot")
TABLES = ("brand", "style")

_DRAWN_ROWS = 12
"""At most this many counts are drawn for a level: more rows get them over and over."""


def trees(
    *,
    max_depth: int = 5,
    branching: bool = True,
    unsorted: bool = True,
    tables: bool = True,
    capacity: bool = True,
    max_rows: int = 3000,
    odd_maps: bool = True,
) -> SearchStrategy[BroadcastTree]:
    """Trees of any shape: empty levels, childless and single rows, huge fan-outs, skew.

    Args:
        max_depth: levels, 1 to 5, named `LEVELS`.
        branching: a level may hang under any earlier one, not only the one before it.
        unsorted: parents may come in any order.
        tables: up to two side tables, named `TABLES`, some of their rows unreferenced.
        capacity: levels may have dead rows.
        max_rows: of any level.
        odd_maps: counts and parents come as lists, arrays and tensors of all integer dtypes, some
            strided; False: as int64 arrays.
    """
    options = (max_depth, branching, unsorted, tables, capacity, max_rows, odd_maps)
    strategy: SearchStrategy[BroadcastTree] = st.composite(_tree)(*options)
    return strategy


def counts(rows: int, budget: int) -> SearchStrategy[list[int]]:
    """Children of each of `rows` rows, at most `budget` in all.

    Mostly few or none; now and then as many as a tile, a warp or a page holds, give or take one.
    """
    few = st.integers(0, 3)
    some = st.integers(0, 40)
    many = st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257, 1000, 1023, 1025, 2049, 3000])
    count = st.one_of(few, few, few, some, many)
    drawn = st.lists(count, min_size=1, max_size=_DRAWN_ROWS)
    strategy: SearchStrategy[list[int]] = drawn.map(lambda given: _spread(given, rows, budget))
    return strategy


def _spread(given: Sequence[int], rows: int, budget: int) -> list[int]:
    spread = np.resize(np.asarray(given, np.int64), rows)
    before = np.cumsum(spread) - spread
    result: list[int] = np.clip(budget - before, 0, spread).tolist()
    return result


def _tree(
    draw: DrawFn,
    max_depth: int,
    branching: bool,
    unsorted: bool,
    tables: bool,
    capacity: bool,
    max_rows: int,
    odd_maps: bool,
) -> BroadcastTree:
    levels = LEVELS[:max_depth]
    rows = {levels[0]: draw(st.integers(0, 6))}
    under: dict[str, str] = {}
    parents: dict[str, np.ndarray] = {}
    shuffled = unsorted and draw(st.booleans())
    for above, level in pairwise(levels):
        # Asked for each level, not once for all: so shrinking can cut a level out of the middle.
        if draw(st.integers(0, 4)) == 0:
            break
        if branching and above != levels[0]:
            above = levels[levels.index(above) - draw(st.integers(0, levels.index(above)))]
            under[level] = above
        found = draw(counts(rows[above], max_rows))
        parents[level] = np.repeat(np.arange(rows[above]), found)
        rows[level] = len(parents[level])
        if shuffled:
            parents[level] = parents[level][draw(_orders(rows[level]))]
    spare = draw(_capacities(rows)) if capacity else None
    arrange = draw(_arrangements()) if odd_maps else np.asarray
    tree = _built(parents, rows, under, spare, arrange, shuffled)
    if tables:
        for name in TABLES[: draw(st.integers(0, len(TABLES)))]:
            tree = draw(_with_table(tree, name, arrange))
    return tree


def _built(
    parents: Mapping[str, np.ndarray],
    rows: Mapping[str, int],
    under: Mapping[str, str],
    capacity: Mapping[str, int] | None,
    arrange: Any,
    as_parents: bool,
) -> BroadcastTree:
    root = next(iter(rows))
    if as_parents:
        maps = {level: arrange(parent) for level, parent in parents.items()}
        return BroadcastTree.from_parents(
            maps, root=root, root_rows=rows[root], under=under, capacity=capacity
        )
    above = {level: under.get(level, before) for before, level in zip(rows, parents, strict=False)}
    maps = {
        level: arrange(np.bincount(parent, minlength=rows[above[level]])[: rows[above[level]]])
        for level, parent in parents.items()
    }
    return BroadcastTree.from_counts(
        maps, root=root, root_rows=rows[root], under=under, capacity=capacity
    )


def _orders(n: int) -> SearchStrategy[np.ndarray]:
    """Orders of n rows: backwards, interleaved, and any at all of the first few."""
    rows = np.arange(n)
    orders = [rows, rows[::-1], *(np.argsort(rows % k, kind="stable") for k in (2, 3, 7))]
    few = range(min(n, _DRAWN_ROWS))
    drawn = st.permutations(few).map(lambda order: np.concatenate([order, rows[len(order) :]]))
    strategy: SearchStrategy[np.ndarray] = st.one_of(st.sampled_from(orders), drawn)
    return strategy.map(lambda order: np.asarray(order, np.int64))


def _capacities(rows: Mapping[str, int]) -> SearchStrategy[dict[str, int] | None]:
    spare = st.fixed_dictionaries({level: st.sampled_from([0, 1, 3, 64]) for level in rows})
    padded = spare.map(lambda more: {level: rows[level] + more[level] for level in rows})
    strategy: SearchStrategy[dict[str, int] | None] = st.one_of(st.none(), st.none(), padded)
    return strategy


def _with_table(tree: BroadcastTree, name: str, arrange: Any) -> SearchStrategy[BroadcastTree]:
    def build(args: tuple[str, int, int, list[int]]) -> BroadcastTree:
        of, unreferenced, spare, pattern = args
        index = np.resize(np.asarray(pattern, np.int64), tree.rows(of))
        return tree.with_table(
            name,
            of=of,
            index=arrange(index),
            rows=max(pattern) + 1 + unreferenced,
            capacity=max(pattern) + 1 + unreferenced + spare if padded else None,
        )

    padded = tree.live(tree.levels[0]) is not None
    patterns = st.lists(st.integers(0, 5), min_size=1, max_size=8)
    arguments = st.tuples(
        st.sampled_from(tree.levels), st.integers(0, 2), st.sampled_from([0, 1, 5]), patterns
    )
    strategy: SearchStrategy[BroadcastTree] = arguments.map(build)
    return strategy


def _arrangements() -> SearchStrategy[Any]:
    """Ways to hand over the same integers."""
    ways = [_as_array, _as_list, _as_tensor, _as_int16, _as_narrow, _as_strided, _as_reversed_view]
    strategy: SearchStrategy[Any] = st.sampled_from(ways)
    return strategy


def _as_array(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.int64)


def _as_list(x: np.ndarray) -> list[int]:
    values: list[int] = x.tolist()
    return values


def _as_tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.int64)).to(torch.int32)


def _as_int16(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(x, np.int16))


def _as_narrow(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.uint8 if x.max(initial=0) < 256 else np.uint32)


def _as_strided(x: np.ndarray) -> Tensor:
    columns = torch.full((len(x), 2), 7, dtype=torch.int64)
    columns[:, 0] = torch.from_numpy(np.asarray(x, np.int64))
    return columns[:, 0]


def _as_reversed_view(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x, np.int32)[::-1])[::-1]
