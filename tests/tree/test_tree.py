"""BroadcastTree: constructors, maps and errors, against naive loops."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError


def make(**kwargs):
    return BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user", **kwargs)


def descendants(tree, level, of):
    """For each row of `of`, its rows at `level`, by walking parents one row at a time."""
    below = [[] for _ in range(tree.rows(of))]
    for row in range(tree.rows(level)):
        at, name = row, level
        while name != of:
            at, name = int(tree.parents(name)[at]), tree.parent(name)
        below[at].append(row)
    return below


def check_maps(tree):
    for level in tree.levels:
        name = tree.parent(level)
        while name is not None:
            expected = descendants(tree, level, name)
            offsets, order = tree.offsets(level, of=name), tree.order(level, of=name)
            rows = torch.arange(tree.rows(level)) if order is None else order
            got = [rows[a:b].tolist() for a, b in pairwise(offsets)]
            assert got[: len(expected)] == expected
            assert all(not extra for extra in got[len(expected) :])
            index = tree.ancestors(level, of=name)
            assert index.dtype == offsets.dtype == torch.int32
            for above, below in enumerate(expected):
                assert all(index[row] == above for row in below)
            name = tree.parent(name)


def test_counts_give_every_map():
    tree = make()
    assert tree.levels == ("user", "vendor", "item")
    assert tree.is_sorted
    assert [tree.rows(level) for level in tree.levels] == [2, 3, 5]
    assert tree.parents("item").tolist() == [0, 0, 0, 2, 2]
    assert tree.ancestors("item", of="user").tolist() == [0, 0, 0, 1, 1]
    assert tree.offsets("item", of="user").tolist() == [0, 3, 5]
    assert tree.counts("item").tolist() == [3, 0, 2]
    assert tree.ancestors("item", of="item").tolist() == [0, 1, 2, 3, 4]
    check_maps(tree)


@pytest.mark.parametrize("seed", range(12))
def test_random_trees_of_any_shape(seed):
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(1, 11))
    levels = [f"l{i}" for i in range(1, depth)]
    under = {name: "root" for name in levels if rng.random() < 0.2}
    rows = {"root": int(rng.integers(0, 4))}
    parents, above = {}, "root"
    for name in levels:
        parent = under.get(name, above)
        n = int(rng.integers(0, 9)) if rows[parent] else 0
        parents[name] = rng.integers(0, max(rows[parent], 1), n)
        if seed % 2:
            parents[name].sort()
        rows[name], above = n, name
    tree = BroadcastTree.from_parents(parents, root="root", root_rows=rows["root"], under=under)
    assert {name: tree.rows(name) for name in tree.levels} == rows
    for name in levels:
        assert tree.parents(name).tolist() == parents[name].tolist()
    check_maps(tree)
    if tree.is_sorted:
        counts = {name: tree.counts(name) for name in levels}
        again = BroadcastTree.from_counts(counts, root="root", root_rows=rows["root"], under=under)
        assert again == tree


def test_a_deep_tree_composes_what_it_does_not_carry():
    rng = np.random.default_rng(3)
    parents, rows = {}, 2
    for i in range(11):
        parents[f"l{i}"] = rng.integers(0, rows, rows + 1)
        rows += 1
    capacity = {f"l{i}": rows + 4 for i in range(11)}
    for extra in ({}, {"capacity": capacity}):
        tree = BroadcastTree.from_parents(parents, root="root", root_rows=2, **extra)
        check_maps(tree)
        route = tree.route("l10", "root")
        assert route is tree.route("l10", "root")
        assert route.offsets[-1] == tree.rows("l10")


def test_from_offsets_rebases_and_keeps_the_start():
    tree = BroadcastTree.from_offsets({"item": [10, 12, 15, 16]}, root="user")
    assert tree == BroadcastTree.from_offsets({"item": [0, 2, 5, 6]}, root="user")
    assert tree.offsets("item", of="user").tolist() == [0, 2, 5, 6]
    assert (tree.start("item"), tree.start("user")) == (10, 0)
    with pytest.raises(TreeError, match=r'offsets\["item"\]'):
        BroadcastTree.from_offsets({"item": [0, 4, 2]}, root="user")


def test_from_nested():
    tree = BroadcastTree.from_nested([[["a", "b"], []], [["c"]], []], levels=("u", "v", "i"))
    assert tree == BroadcastTree.from_counts({"v": [2, 1, 0], "i": [2, 0, 1]}, root="u")


def test_depth_one_has_no_broadcast():
    tree = BroadcastTree.from_counts({}, root="user", root_rows=4)
    assert (tree.rows("user"), tree.capacity("user")) == (4, 4)
    assert tree.route("user", "user") is None
    assert BroadcastTree.from_counts({}, root="user", root_rows=0).rows("user") == 0


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8], ids=str
)
def test_any_integer_map_in_any_stride(dtype):
    columns = torch.tensor([[1, 9], [0, 9], [1, 9], [0, 9]], dtype=dtype)
    tree = BroadcastTree.from_parents({"item": columns[:, 0]}, root="user", root_rows=2)
    assert not tree.is_sorted
    assert tree.parents("item").tolist() == [1, 0, 1, 0]
    assert tree.order("item", of="user").tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: make(capacity={"item": 4}), ["capacity", "at least", "4"]),
        (lambda: make(capacity={"basket": 4}), ["capacity", "basket"]),
        (lambda: make(under={"item": "basket"}), ["under", "basket"]),
        (lambda: BroadcastTree.from_counts({"item": [1, -3]}, root="user"), ["item", "-3", "1"]),
        (lambda: BroadcastTree.from_counts({"item": [0.5]}, root="user"), ["item", "float"]),
        (lambda: BroadcastTree.from_counts({"item": torch.tensor([True])}, root="u"), ["bool"]),
        (lambda: BroadcastTree.from_counts({"item": [1], "b": [1, 1]}, root="u"), ['"b"', "2"]),
        (lambda: BroadcastTree.from_counts({"user": [1]}, root="user"), ["distinct", "user"]),
        (lambda: BroadcastTree.from_counts({}, root="user"), ["root_rows"]),
        (
            lambda: BroadcastTree.from_parents({"item": [0, 2]}, root="user", root_rows=2),
            ['parents["item"]', "2", "1"],
        ),
        (
            lambda: BroadcastTree.from_parents(
                {"item": torch.ones(2, dtype=torch.bfloat16)}, root="user", root_rows=2
            ),
            ["bfloat16"],
        ),
        (lambda: make().ancestors("user", of="item"), ["of", "item"]),
        (lambda: make().ancestors("item", of="shelf"), ["shelf"]),
        (lambda: make().parents("user"), ["root"]),
        (lambda: make().keys("item"), ["keys"]),
        (lambda: make().origin("item"), ["select"]),
        (lambda: make().split(), ["concat"]),
        (lambda: make().pack(torch.zeros(2, 2)), ["from_padded"]),
        (lambda: make().chain("inputs", []), ["inputs"]),
        (lambda: make().check("x", torch.zeros(4, 2), "item"), ["x", "5 rows", "(4, 2)"]),
        (lambda: make().check("x", torch.zeros(5, 2, device="meta"), "item"), ["device"]),
        (lambda: make().rows("shelf"), ["shelf"]),
    ],
)
def test_errors_name_argument_rule_and_value(build, words):
    with pytest.raises(TreeError) as caught:
        build()
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_capacity_leaves_dead_rows_empty():
    tree = make(capacity={"user": 4, "item": 9})
    assert [tree.rows(level) for level in tree.levels] == [2, 3, 5]
    assert [tree.capacity(level) for level in tree.levels] == [4, 3, 9]
    assert [int(tree.live(level)) for level in tree.levels] == [2, 3, 5]
    assert tree.offsets("item", of="user").tolist() == [0, 3, 5, 5, 5]
    assert tree.ancestors("item", of="user").tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    check_maps(tree)
    # A full tree built with capacity reads live counts too: what is traced with it serves others.
    assert make(capacity={"item": 5}).live("item") is not None
    assert make().live("item") is None


def test_tables():
    tree = make().with_table("brand", of="vendor", index=[1, 0, 1], rows=3)
    assert tree.tables == ("brand",)
    assert tree.rows("brand") == tree.capacity("brand") == 3
    assert tree.table_level("brand") == "vendor"
    assert tree.ancestors("item", of="brand").tolist() == [1, 1, 1, 1, 1]
    assert tree.ancestors("vendor", of="brand").tolist() == [1, 0, 1]
    assert tree.offsets("vendor", of="brand").tolist() == [0, 1, 3, 3]
    assert tree.order("vendor", of="brand").tolist() == [1, 0, 2]
    two = tree.with_table("shelf", of="user", index=[0, 0])
    assert two.ancestors("item", of="shelf").tolist() == [0] * 5
    assert two.ancestors("item", of="brand").tolist() == [1] * 5
    with pytest.raises(TreeError, match="brand"):
        tree.with_table("brand", of="vendor", index=[0, 0, 0])
    with pytest.raises(TreeError, match="index"):
        tree.with_table("shelf", of="vendor", index=[0, 0, 5], rows=3)
    with pytest.raises(TreeError, match="of"):
        tree.route("user", "brand")


def test_chain_is_coarse_first_whatever_the_order_of_names():
    tree = make().with_table("brand", of="vendor", index=[1, 0, 1])
    assert tree.chain("x", ["item", "brand", "user"]) == ("user", "brand", "item")
    assert tree.chain("x", ["item", "vendor", "brand"]) == ("brand", "vendor", "item")
    assert tree.chain("x", ["user"], "item") == ("user", "item")
    assert tree.chain("x", ["brand"]) == ("brand", "vendor")
    branching = BroadcastTree.from_counts(
        {"item": [1, 2], "session": [1, 0]}, root="user", under={"session": "user"}
    )
    assert branching.chain("x", ["session", "user"]) == ("user", "session")
    with pytest.raises(TreeError, match="one path"):
        branching.chain("x", ["session", "item"])
    with pytest.raises(TreeError, match="one path"):
        tree.chain("x", ["item"], "vendor")


def test_pickle_equality_and_no_hash():
    tree = make(capacity={"item": 9}).with_table("brand", of="vendor", index=[1, 0, 1])
    again = pickle.loads(pickle.dumps(tree))
    assert again == tree
    assert (
        again.ancestors("item", of="brand").tolist() == tree.ancestors("item", of="brand").tolist()
    )
    assert tree != make()
    assert make() != BroadcastTree.from_counts({"vendor": [1, 2], "item": [3, 0, 2]}, root="user")
    assert make() != "tree"
    with pytest.raises(TypeError, match="unhashable"):
        hash(tree)
    with pytest.raises(TypeError, match="from_counts"):
        BroadcastTree()


def test_pictures(capsys):
    tree = make(capacity={"item": 9}).with_table("brand", of="vendor", index=[1, 0, 1])
    assert repr(make()) == "BroadcastTree(user 2 -> vendor 3 -> item 5, cpu)"
    assert "item 5/9" in repr(tree)
    assert "brand: 2 rows off vendor" in repr(tree)
    branching = BroadcastTree.from_counts(
        {"item": [1, 2], "session": [1, 0]}, root="user", under={"session": "user"}
    )
    assert "user 2 -> [item 3; session 1]" in repr(branching)
    many = BroadcastTree.from_parents({"item": [1, 0, 1, 0, 2] * 5}, root="user", root_rows=9)
    for each in (tree, branching, many):
        each.show()
    shown = capsys.readouterr().out
    assert "vendor 1" in shown
    assert "no item" in shown
    assert "6 more user rows" in shown


def test_stats_count_what_broadcasting_costs():
    stats = make().stats(widths={"user": 64, "vendor": 8}, out=16, dtype=torch.float16)
    assert stats.finest == "item"
    assert stats.levels["user"].extra_bytes == (5 - 2) * 64 * 2
    assert stats.levels["vendor"].extra_flops == 2 * (5 - 3) * 8 * 16
    assert stats.extra_bytes == (5 - 2) * 64 * 2 + (5 - 3) * 8 * 2
    assert stats.levels["item"].childless == 1
    assert stats.levels["item"].fan_out[0] == 0
    assert stats.levels["item"].fan_out[-1] == 3
    empty = BroadcastTree.from_counts({"item": []}, root="user").stats()
    assert empty.extra_bytes == 0


def test_plan_covers_every_row_once():
    tree = BroadcastTree.from_counts({"item": [3, 0, 130, 1]}, root="user")
    made = ikbo.plan("target_attention", tree, level="item", of="user", tile_rows=64)
    assert made.count.tolist() == [64, 64, 3, 2, 1]
    assert made.segment.tolist() == [2, 2, 0, 2, 3]
    assert made.start.tolist() == [3, 67, 0, 131, 133]
    lengths = ikbo.plan("target_attention", tree, level="item", of="user", lengths=[100, 1, 1, 500])
    assert lengths.segment.tolist()[:2] == [3, 0]
    with pytest.raises(ValueError, match="op must be"):
        ikbo.plan("linear", tree, level="item", of="user")
    with pytest.raises(TreeError, match="lengths"):
        ikbo.plan("target_attention", tree, level="item", of="user", lengths=[1])
