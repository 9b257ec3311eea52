"""Trees from trees: sub-trees, merged requests, padded tensors, keys."""

import numpy as np
import pytest
import torch

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError


def make():
    return BroadcastTree.from_counts(
        {"vendor": [2, 0, 1], "item": [3, 0, 2], "session": [1, 0, 2]},
        root="user",
        under={"session": "user"},
    )


def random_tree(seed, levels=("vendor", "item")):
    rng = np.random.default_rng(seed)
    rows = root_rows = int(rng.integers(0, 4))
    parents = {}
    for level in levels:
        n = int(rng.integers(0, 9)) if rows else 0
        parents[level] = rng.integers(0, max(rows, 1), n)
        if seed % 2:
            parents[level].sort()
        rows = n
    return BroadcastTree.from_parents(parents, root="user", root_rows=root_rows)


def path(tree, row):
    """(vendor, user) of an item, by parents."""
    vendor = int(tree.parents("item")[row])
    return vendor, int(tree.parents("vendor")[vendor])


@pytest.mark.parametrize("seed", range(10))
def test_concat_then_split_gives_the_trees_back(seed):
    trees = [random_tree(seed + i) for i in range(4)]
    merged = ikbo.concat(trees)
    assert merged.split() == trees
    shift = dict.fromkeys(merged.levels, 0)
    for tree in trees:
        for row in range(tree.rows("item")):
            vendor, user = path(merged, row + shift["item"])
            assert (vendor - shift["vendor"], user - shift["user"]) == path(tree, row)
        for level in merged.levels:
            shift[level] += tree.rows(level)
    scores = torch.arange(merged.rows("item")).float()
    parts = merged.split_rows(scores, "item")
    assert [len(part) for part in parts] == [tree.rows("item") for tree in trees]
    assert torch.equal(torch.cat(parts), scores)
    assert all(part.numel() == 0 or part._base is scores for part in parts)


def test_concat_with_capacity_ignores_dead_rows():
    small = BroadcastTree.from_counts({"item": [2]}, root="user", capacity={"item": 5})
    merged = ikbo.concat([small, small], capacity={"user": 4, "item": 8})
    assert (merged.rows("item"), merged.capacity("item")) == (4, 8)
    assert merged.ancestors("item", of="user").tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    first, second = merged.split_rows(torch.arange(8), "item")
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])


def test_concat_puts_tables_end_to_end():
    one = BroadcastTree.from_counts({"item": [2]}, root="user")
    a = one.with_table("brand", of="item", index=[1, 0], rows=3)
    b = one.with_table("brand", of="item", index=[1, 1])
    merged = ikbo.concat([a, b])
    assert merged.rows("brand") == 5
    assert merged.ancestors("item", of="brand").tolist() == [1, 0, 4, 4]
    with pytest.raises(TreeError, match=r"trees\[1\]"):
        ikbo.concat([a, one])
    with pytest.raises(TreeError, match="at least one"):
        ikbo.concat([])


def test_select_rebases_maps_and_says_where_rows_came_from():
    tree = make().with_table("brand", of="vendor", index=[1, 0, 1], rows=2)
    part = tree.select(user=[2, 0])
    assert [part.rows(level) for level in part.levels] == [2, 3, 5, 3]
    assert part.origin("vendor").tolist() == [2, 0, 1]
    assert part.origin("item").tolist() == [3, 4, 0, 1, 2]
    assert part.origin("session").tolist() == [1, 2, 0]
    assert part.ancestors("item", of="user").tolist() == [0, 0, 1, 1, 1]
    assert part.ancestors("vendor", of="brand").tolist() == [1, 1, 0]
    middle = tree.select(vendor=[0])
    assert middle.origin("user").tolist() == [0]
    assert middle.origin("item").tolist() == [0, 1, 2]
    assert middle.origin("session").tolist() == [0]
    for wrong in ({"user": [3]}, {"user": [0, 0]}, {"user": [0], "item": [0]}, {}, {"shelf": [0]}):
        with pytest.raises(TreeError):
            tree.select(**wrong)


@pytest.mark.parametrize("seed", range(8))
def test_selected_values_are_those_of_the_whole(seed):
    tree = random_tree(seed)
    users = torch.randperm(tree.rows("user"), generator=torch.Generator().manual_seed(seed))[:2]
    part = tree.select(user=users)
    x = torch.randn(tree.rows("user"), 3)
    whole = x[tree.ancestors("item", of="user").long()]
    own = x[part.origin("user").long()][part.ancestors("item", of="user").long()]
    assert torch.equal(own, whole[part.origin("item").long()])


def test_padded_requests():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    tree = BroadcastTree.from_padded(mask)
    assert tree.counts("item").tolist() == [2, 0, 4]
    x = torch.randn(3, 4, 2, requires_grad=True)
    packed = tree.pack(x)
    assert torch.equal(packed, x[mask])
    padded = tree.unpack(packed, fill=-1.0)
    assert torch.equal(padded, torch.where(mask[..., None], x, -1.0))
    padded.sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand_as(x).float())
    by_length = BroadcastTree.from_padded([2, 0, 3], width=4)
    assert by_length.pack(torch.arange(12).view(3, 4)).tolist() == [0, 1, 8, 9, 10]
    assert BroadcastTree.from_padded([2, 0, 3]).unpack(torch.ones(5)).shape == (3, 3)
    with pytest.raises(TreeError, match="padded"):
        tree.pack(torch.zeros(3, 5))
    with pytest.raises(TreeError, match="packed"):
        tree.unpack(torch.zeros(5))
    for wrong in (torch.ones(2, 2), [5], torch.ones(2, 2, 2, dtype=torch.bool)):
        with pytest.raises(TreeError):
            BroadcastTree.from_padded(wrong, width=2)


def test_keys_group_a_flat_log():
    log = {
        "user": np.array([7, 3, 7, 3, 9]),
        "vendor": np.array(["b", "a", "a", "a", "b"]),
        "item": np.arange(5) * 10,
    }
    tree = BroadcastTree.from_keys(log, rows={"user": [3, 7, 8, 9]}, shared=["vendor"])
    assert tree.keys("user").tolist() == [3, 7, 8, 9]
    assert tree.rows("vendor") == 4
    users = tree.ancestors("item", of="user").tolist()
    vendors = tree.parents("item").tolist()
    for row in range(5):
        assert tree.keys("user")[users[row]] == log["user"][row]
        assert tree.keys("vendor")[vendors[row]] == log["vendor"][row]
    assert tree.keys("item").tolist() == [0, 10, 20, 30, 40]
    brand = tree.ancestors("item", of="vendor_shared").tolist()
    assert tree.rows("vendor_shared") == 2
    assert [tree.keys("vendor_shared")[b] for b in brand] == log["vendor"].tolist()
    named = BroadcastTree.from_keys(log, shared={"vendor": "brand"})
    assert named.tables == ("brand",)
    assert named.keys("user").tolist() == [7, 3, 9]
    part = tree.select(user=[1])
    assert part.keys("user").tolist() == [7]
    assert part.keys("item").tolist() == [0, 20]
    merged = ikbo.concat([tree, tree])
    assert merged.keys("item").tolist() == [0, 10, 20, 30, 40] * 2
    with pytest.raises(TreeError, match="9"):
        BroadcastTree.from_keys(log, rows={"user": [3, 7]})
    with pytest.raises(TreeError, match="float"):
        BroadcastTree.from_keys({"user": np.array([0.5])})
