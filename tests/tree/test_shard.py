"""Trees split at the root: every row in one shard, balanced, the same in every process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree import BroadcastTree, TreeError, shard
from ikbo_tree.testing.strategies import trees


def split(tree, world, **options):
    return [shard(tree, rank, world, **options) for rank in range(world)]


def leaves_below(tree):
    """Leaves of each root row, one leaf at a time."""
    parents = {tree.parent(level) for level in tree.levels}
    found = [0] * tree.rows(tree.levels[0])
    for level in tree.levels:
        if level in parents:
            continue
        above = tree.ancestors(level, of=tree.levels[0])
        for row in range(tree.rows(level)):
            found[int(above[row])] += 1
    return found


@settings(max_examples=60)
@given(tree=trees(max_rows=200), world=st.integers(1, 5))
def test_every_row_is_in_one_shard_below_its_own_ancestors(tree, world):
    parts = split(tree, world)
    for level in tree.levels:
        origins = [part.origin(level).tolist() for part in parts]
        assert sorted(row for origin in origins for row in origin) == list(range(tree.rows(level)))
        above = tree.parent(level)
        if above is None:
            assert all(origin == sorted(origin) for origin in origins)
            continue
        for part, origin in zip(parts, origins, strict=True):
            theirs = part.origin(above)[part.parents(level)].tolist()
            assert theirs == tree.parents(level)[origin].tolist()
    for part in parts:
        assert part.tables == tree.tables
        for table in tree.tables:
            of = tree.table_level(table)
            theirs = tree.ancestors(of, of=table)[part.origin(of)]
            assert part.ancestors(of, of=table).tolist() == theirs.tolist()
            assert part.rows(table) == tree.rows(table)


@settings(max_examples=60)
@given(tree=trees(max_rows=200), world=st.integers(1, 5))
def test_no_shard_is_far_dearer_than_it_must_be(tree, world):
    """At most the mean and one root row above it, as any shard was the cheapest when it got one."""
    costs = leaves_below(tree)
    most = max(sum(leaves_below(part)) for part in split(tree, world))
    assert most <= sum(costs) / world + max(costs, default=0) * (1 - 1 / world) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_at_most_four_thirds_of_the_best_split(seed):
    """Against all splits of seven users among three."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 12, 7)
    tree = BroadcastTree.from_counts({"item": costs}, root="user")
    ways = np.stack(np.meshgrid(*[np.arange(3)] * 7), -1).reshape(-1, 7)
    best = min(max(costs[way == rank].sum() for rank in range(3)) for way in ways)
    most = max(part.rows("item") for part in split(tree, 3))
    assert best <= most <= 4 / 3 * best


def test_one_huge_request_beside_many_small_ones():
    tree = BroadcastTree.from_counts({"item": [1] * 500 + [100_000] + [1] * 500}, root="user")
    first, second = split(tree, 2)
    assert first.origin("user").tolist() == [500]
    assert second.rows("user") == second.rows("item") == 1000


def test_users_without_items_are_spread_too():
    tree = BroadcastTree.from_counts({"item": [0] * 6}, root="user")
    assert [part.origin("user").tolist() for part in split(tree, 3)] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("as_given", [list, np.array, torch.tensor])
def test_by_cost(as_given):
    tree = BroadcastTree.from_counts({"item": [9, 1, 1, 1]}, root="user")
    parts = split(tree, 2, by=as_given([1.0, 2.0, 4.0, 1.0]))
    assert [part.origin("user").tolist() for part in parts] == [[2], [0, 1, 3]]


def test_costs_and_leaves_of_dead_rows_do_not_count():
    counts, capacity = {"item": [3, 1, 1]}, {"user": 5, "item": 9}
    tree = BroadcastTree.from_counts(counts, root="user", capacity=capacity)
    for by in ("leaves", torch.tensor([3.0, 1, 1, torch.nan, -5])):
        parts = split(tree, 2, by=by)
        assert [part.origin("user").tolist() for part in parts] == [[0], [1, 2]]
        assert all(part.live("user") is None for part in parts)


def test_leaves_of_every_branch_count():
    tree = BroadcastTree.from_counts(
        {"item": [4, 0, 1], "session": [0, 3, 1]}, root="user", under={"session": "user"}
    )
    parts = split(tree, 2)
    assert [part.origin("user").tolist() for part in parts] == [[0], [1, 2]]
    assert parts[1].origin("session").tolist() == [0, 1, 2, 3]


def test_more_processes_than_requests_and_no_request():
    tree = BroadcastTree.from_counts({"item": [2]}, root="user")
    parts = split(tree, 3)
    assert [part.rows("user") for part in parts] == [1, 0, 0]
    assert parts[1] == BroadcastTree.from_counts({"item": []}, root="user")
    assert split(parts[1], 2) == [parts[1]] * 2


def test_errors_are_in_the_callers_words():
    tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    with pytest.raises(TreeError, match="world must be at least 1; got 0"):
        shard(tree, 0, 0)
    for rank in (-1, 2):
        with pytest.raises(TreeError, match=f"rank must lie in 0 ... 1; got {rank}"):
            shard(tree, rank, 2)
    with pytest.raises(TreeError, match="by must be \"leaves\", or a cost a root row; got 'items'"):
        shard(tree, 0, 2, by="items")
    with pytest.raises(TreeError, match=r"by must have shape \(2,\), a root row each; got \(3,\)"):
        shard(tree, 0, 2, by=[1, 2, 3])
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(TreeError, match=r"by must be finite and not negative; got .* position"):
            shard(tree, 0, 2, by=[1, bad])
    with pytest.raises(TreeError, match="by must hold numbers; got list"):
        shard(tree, 0, 2, by=["dear", "cheap"])
