"""The oracles themselves, against numbers worked out by hand and against torch's flat ops."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ikbo_tree import BroadcastTree
from ikbo_tree.testing import oracles
from ikbo_tree.testing.oracles import OracleMemory, Parents

TREE = BroadcastTree.from_counts({"vendor": [2, 0, 1], "item": [3, 0, 2]}, root="user").with_table(
    "brand", of="vendor", index=[1, 1, 0], rows=3
)
ITEM_USER = [0, 0, 0, 2, 2]
ITEM_VENDOR = [0, 0, 0, 2, 2]
ITEM_BRAND = [1, 1, 1, 0, 0]
INF = float("inf")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_parents():
    up = Parents(TREE)
    assert [up.above("item", i, "user") for i in range(5)] == ITEM_USER
    assert [up.above("item", i, "brand") for i in range(5)] == ITEM_BRAND
    assert [up.above("vendor", i, "brand") for i in range(3)] == [1, 1, 0]
    assert up.below("item", "user") == [[0, 1, 2], [], [3, 4]]
    assert up.below("item", "brand") == [[3, 4], [0, 1, 2], []]
    assert up.below("user", "user") == [[0], [1], [2]]
    with pytest.raises(ValueError, match="is not above"):
        up.above("user", 0, "item")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [7, 0, 24]),
        ("mean", [7 / 3, 0, 12]),
        ("max", [4, -INF, 16]),
        ("min", [1, INF, 8]),
        ("logsumexp", [np.log(np.exp([1, 2, 4]).sum()), -INF, np.log(np.exp([8, 16]).sum())]),
    ],
)
def test_reduce(op, expected):
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    np.testing.assert_allclose(oracles.reduce(TREE, x, "item", "user", op), expected, rtol=1e-15)


def test_broadcast_and_softmax():
    x = np.array([10.0, 20.0, 30.0])
    assert oracles.broadcast(TREE, x, "user", "item").tolist() == [10, 10, 10, 30, 30]
    assert oracles.broadcast(TREE, x, "brand", "item").tolist() == [20, 20, 20, 10, 10]
    p = oracles.segment_softmax(TREE, np.log([1.0, 2.0, 5.0, 3.0, 1.0]), "item", "vendor")
    np.testing.assert_allclose(p, [1 / 8, 2 / 8, 5 / 8, 3 / 4, 1 / 4], rtol=1e-15)
    nothing = np.array([-INF, -INF, -INF, 0.0, -INF])
    p = oracles.segment_softmax(TREE, nothing, "item", "user")
    assert p.tolist() == [0, 0, 0, 1, 0]


def test_dead_rows_are_zero_and_not_read():
    tree = BroadcastTree.from_counts({"item": [2]}, root="user", capacity={"user": 3, "item": 4})
    x = np.array([1.0, 2.0, np.nan, np.nan])
    assert oracles.reduce(tree, x, "item", "user", "max").tolist() == [2, 0, 0]
    assert oracles.broadcast(tree, x[[0, 2, 2]], "user", "item").tolist() == [1, 1, 0, 0]
    assert oracles.segment_softmax(tree, x * 0, "item", "user").tolist()[:2] == [0.5, 0.5]


def test_linear_ops():
    x = {"item": random(5, 2), "user": random(3, 4, seed=1), "brand": random(3, 3, seed=2)}
    w = {"item": random(6, 2), "user": random(6, 4, seed=3), "brand": random(6, 3, seed=4)}
    bias = random(6, seed=5)
    flat = np.concatenate([x["item"], x["user"][ITEM_USER], x["brand"][ITEM_BRAND]], axis=1)
    weight = np.concatenate(list(w.values()), axis=1)
    expected = F.linear(*map(torch.from_numpy, (flat, weight, bias)))
    np.testing.assert_allclose(oracles.linear(TREE, x, w, bias, "item"), expected, rtol=1e-12)
    stacked = {name: np.stack([y, 2 * y], axis=2) for name, y in x.items()}
    found = oracles.linear_compression(TREE, stacked, w, "item")
    plain = oracles.linear(TREE, x, w, None, "item")
    np.testing.assert_allclose(found, np.stack([plain, 2 * plain], axis=2), rtol=1e-12)


def test_target_attention_is_torchs_on_gathered_keys():
    """Two memories, one of them of a table and grouped heads: one softmax over both."""
    q = random(5, 2, 4, 6)
    user = OracleMemory("user", random(3, 3, 2, 6, seed=1), random(3, 3, 2, 5, seed=2))
    brand = OracleMemory("brand", random(3, 4, 4, 6, seed=3), random(3, 4, 4, 5, seed=4))
    o, lse = oracles.target_attention(TREE, q, [user, brand], "item")
    k, v = (
        np.concatenate([np.repeat(a[ITEM_USER], 2, axis=2), b[ITEM_BRAND]], axis=1)
        for a, b in ((user.k, brand.k), (user.v, brand.v))
    )
    q_, k_, v_ = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q_, k_, v_).transpose(1, 2)
    np.testing.assert_allclose(o, expected, rtol=1e-12)
    scores = torch.einsum("rhnd,rhkd->rnhk", q_, k_) * 6**-0.5
    np.testing.assert_allclose(lse, scores.logsumexp(-1), rtol=1e-12)


def test_packed_padded_and_masked_memories_agree():
    q, k, v, bias = random(5, 1, 2, 4), random(3, 3, 2, 4), random(3, 3, 2, 4), random(3, 3, 2)
    lengths = np.array([2, 3, 0])
    padded = OracleMemory("user", k, v, lengths=lengths, bias=bias)
    masked = OracleMemory("user", k, v, bias=bias, mask=np.arange(3) < lengths[:, None])
    rows = [(r, i) for r in range(3) for i in range(lengths[r])]
    at = tuple(np.array(rows).T)
    spare = np.full((1, 2, 4), np.nan)
    packed = OracleMemory(
        "user",
        np.concatenate([spare, k[at], spare]),
        np.concatenate([spare, v[at], spare]),
        offsets=np.array([1, 3, 6, 6]),
        bias=np.concatenate([spare[..., 0], bias[at], spare[..., 0]]),
    )
    found = [oracles.target_attention(TREE, q, [m], "item") for m in (padded, masked, packed)]
    for o, lse in found[1:]:
        np.testing.assert_array_equal(o, found[0][0])
        np.testing.assert_array_equal(lse, found[0][1])
    assert (found[0][0][3:] == 0).all()  # user 2 has no keys
    assert (found[0][1][3:] == -INF).all()


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_is_torchs(causal):
    q, k, v = random(3, 4, 2, 6), random(3, 4, 2, 6, seed=1), random(3, 4, 2, 6, seed=2)
    o, _ = oracles.self_attention(TREE, q, OracleMemory("user", k, v), causal)
    q_, k_, v_ = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal).transpose(1, 2)
    np.testing.assert_allclose(o, expected, rtol=1e-12)
