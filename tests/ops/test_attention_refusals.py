"""What `target_attention` takes and refuses, and in which words."""

from dataclasses import replace

import pytest
import torch
from attention_naive import draw

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError

TREE = BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")


def user(**changes):
    return replace(ikbo.Memory("user", draw(2, 4, 2, 8), draw(2, 4, 2, 8)), **changes)


def packed(**changes):
    offsets = torch.tensor([0, 2, 6])
    return replace(ikbo.Memory("user", draw(6, 2, 8), draw(6, 2, 8), offsets=offsets), **changes)


@pytest.mark.parametrize(
    ("memories", "message"),
    [
        ([], "memories must have at least one entry"),
        ([user(level="shop")], r"memories must name one of the levels .*'shop'"),
        ({"user": (draw(3, 4, 2, 8),) * 2}, r'memories\["user"\]\.k must have 2 rows'),
        ([user(k=draw(2, 4))], r"memories\[0\]\.k must have shape \[rows, S, Hkv, D\], or packed"),
        ([user(k=draw(2, 4, 3, 8), v=draw(2, 4, 3, 8))], "heads that divides the queries' 2"),
        ([user(k=draw(2, 4, 2, 7))], "k must be 8 wide, as the queries are"),
        ([user(v=draw(2, 3, 2, 8))], r"v must have shape \[2, 4, 2, Dv\]"),
        ([user(), user(v=draw(2, 4, 2, 5))], r"memories\[1\]\.v must be 8 wide"),
        ([user(lengths=torch.tensor([1, 5]))], r"lengths must lie in 0 \.\.\. 4.*; got 5"),
        ([user(lengths=torch.tensor([-1, 3]))], r"lengths must lie in 0 \.\.\. 4.*; got -1"),
        ([user(lengths=torch.tensor([1, 2, 3]))], r"lengths must have shape \[2\]"),
        ([user(offsets=torch.tensor([0, 1, 2]))], "must be packed"),
        ([packed(offsets=None)], "must come with offsets"),
        ([packed(offsets=torch.tensor([0, 4, 2]))], "must not decrease; got 4, 2 at position 1"),
        ([packed(offsets=torch.tensor([0, 4, 7]))], r"must lie in 0 \.\.\. 6.*; got 0 \.\.\. 7"),
        ([packed(offsets=torch.tensor([-1, 4, 6]))], r"must lie in 0 \.\.\. 6"),
        ([packed(offsets=torch.tensor([0, 6]))], r"offsets must have shape \[3\]"),
        ([user(bias=draw(2, 4, 3))], r"bias must have shape \[2, 4\] or \[2, 4, 2\]"),
        ([user(mask=torch.ones(2, 5, dtype=torch.bool))], r"mask must have shape \[2, 4\]"),
        (
            [user(mask=torch.ones(2, 4, dtype=torch.bool, device="meta"))],
            "must be on the tree's device",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_misfits_are_named(memories, message):
    with pytest.raises(TreeError, match=message):
        ikbo.target_attention(draw(5, 1, 2, 8), memories, tree=TREE, level="item")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": draw(2, 4, 2, 8, dtype=torch.float16)}, "k must be torch.float32, as q is"),
        ({"lengths": torch.tensor([1.0, 2.0])}, "lengths must be integers"),
        ({"lengths": torch.tensor([True, False])}, "lengths must be integers"),
        ({"mask": torch.ones(2, 4)}, "mask must be bool"),
        ({"bias": torch.ones(2, 4, dtype=torch.int64)}, "bias must be float64"),
    ],
    ids=str,
)
def test_wrong_dtypes_are_named(changes, message):
    with pytest.raises(TypeError, match=message):
        ikbo.target_attention(draw(5, 1, 2, 8), [user(**changes)], tree=TREE, level="item")


def test_queries_levels_and_plans_that_do_not_fit():
    attend = ikbo.target_attention
    with pytest.raises(TreeError, match=r"q must have shape \[rows, n_seed, H, D\]"):
        attend(draw(5, 2, 8), [user()], tree=TREE, level="item")
    with pytest.raises(TreeError, match="q must have 5 rows"):
        attend(draw(4, 1, 2, 8), [user()], tree=TREE, level="item")
    with pytest.raises(TypeError, match="q must be float64"):
        attend(torch.ones(5, 1, 2, 8, dtype=torch.int64), [user()], tree=TREE, level="item")
    item = ikbo.Memory("item", draw(5, 4, 2, 8), draw(5, 4, 2, 8))
    with pytest.raises(TreeError, match="must lie on one path down to 'vendor'"):
        attend(draw(3, 1, 2, 8), [item], tree=TREE, level="vendor")
    other = BroadcastTree.from_counts({"vendor": [1, 1], "item": [3, 1]}, root="user")
    q = draw(5, 1, 2, 8)
    plan = ikbo.plan("target_attention", TREE, level="item", of="user")
    plain = attend(q, [user()], tree=TREE, level="item")
    assert torch.equal(attend(q, [user()], tree=TREE, level="item", plan=plan), plain)
    plan = ikbo.plan("target_attention", other, level="item", of="user")
    with pytest.raises(TreeError, match="plan must be of a tree with 5 rows"):
        attend(q, [user()], tree=TREE, level="item", plan=plan)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_any_integers(dtype):
    """Lengths and offsets of any integer dtype and stride, a mask of any stride."""
    padded, long = user(), packed()
    lengths = torch.tensor([[3, 9], [1, 9]], dtype=dtype)[:, 0]
    offsets = torch.tensor([[0, 9], [2, 9], [6, 9]], dtype=dtype)[:, 0]
    q = draw(5, 1, 2, 8)
    given = [replace(padded, lengths=lengths), replace(long, offsets=offsets)]
    plain = [replace(padded, lengths=torch.tensor([3, 1])), long]
    found = [ikbo.target_attention(q, m, tree=TREE, level="item") for m in (given, plain)]
    assert torch.equal(*found)
