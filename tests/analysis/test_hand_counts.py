"""Numbers written out by hand, for every op, on one small tree."""

import pytest
import torch

import ikbo_tree.ops
from ikbo_tree import BroadcastTree, LowRankCross, TreeError, analysis
from ikbo_tree.analysis import Cost

# 2 users, 3 vendors, 5 items; a map from items takes 4 bytes each, one from vendors likewise.
TREE = BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
NAMES = ("user", "vendor", "item")
HALF = torch.float16
OF_WEIGHTS = {"pad_weight"}
"""What has no rows of a tree, and runs once for a model."""


def numbers(work):
    return [(step.op, step.level, *step.cost) for step in work.steps]


def test_every_public_op_has_a_count():
    public = {name for name in ikbo_tree.ops.__all__ if name[0].islower()}
    assert public - OF_WEIGHTS <= set(analysis.__all__)


def test_linear():
    found = analysis.linear(TREE, {"user": 4, "vendor": 3, "item": 2}, 6, dtype=HALF)
    assert numbers(found.flat) == [
        ("broadcast", "user", 0, 2 * 2 * 4 + 4 * 5 + 2 * 5 * 4),
        ("broadcast", "vendor", 0, 2 * 3 * 3 + 4 * 5 + 2 * 5 * 3),
        ("concatenate", "item", 0, 2 * 2 * 5 * 9),
        ("linear", "item", 2 * 5 * 9 * 6, 2 * (5 * 9 + 9 * 6 + 5 * 6)),
    ]
    # Partial results are float32: written once, read once, with the map to them.
    assert numbers(found.tree) == [
        ("linear", "user", 2 * 2 * 4 * 6, 2 * (2 * 4 + 4 * 6) + 4 * 2 * 6),
        ("linear", "vendor", 2 * 3 * 3 * 6, 2 * (3 * 3 + 3 * 6) + 4 * 3 * 6 + 4 * 2 * 6 + 4 * 3),
        ("linear", "item", 2 * 5 * 2 * 6, 2 * (5 * 2 + 2 * 6 + 5 * 6) + 4 * 3 * 6 + 4 * 5),
    ]


def test_a_coarse_level_with_more_rows_than_are_read():
    """Of 7 users the items read 2 at most."""
    tree = BroadcastTree.from_counts({"item": [1, 0, 0, 1, 0, 0, 0]}, root="user")
    found = analysis.linear(tree, {"user": 4}, 6, level="item")
    assert found.flat.steps[0].cost.bytes == 4 * 2 * 4 + 4 * 2 + 4 * 2 * 4
    assert found.tree.by_level()["item"].bytes == 4 * 2 * 6 + 4 * 2 + 4 * 2 * 6


def test_linear_compression():
    found = analysis.linear_compression(TREE, {"user": 4, "item": 2}, 6, 8)
    assert numbers(found.tree) == [
        ("linear_compression", "user", 2 * 2 * 6 * 4 * 8, 4 * (2 * 4 * 8 + 6 * 4 + 2 * 6 * 8)),
        (
            "linear_compression",
            "item",
            2 * 5 * 6 * 2 * 8,
            4 * (5 * 2 * 8 + 6 * 2 + 5 * 6 * 8 + 2 * 6 * 8) + 4 * 5,
        ),
    ]


def test_target_attention_has_the_intensities_of_the_published_case():
    """64 queries a candidate, 70 candidates a user, 1,024 keys, heads of 128 in 16 bits.

    By hand, in FLOP a byte and for one item and head: 4 * 64 * 1024 * 128 operations; 2 * 64 * 128
    elements of queries and results; 2 * 1024 * 128 of keys and values, once an item or once a user.
    """
    tree = BroadcastTree.from_counts({"item": [70] * 3}, root="user")
    sizes = {"level": "item", "dim": 128, "heads": 2, "n_seed": 64, "dtype": HALF}
    found = analysis.target_attention(tree, {"user": 1024}, **sizes)
    flops, own, keys = 4 * 64 * 1024 * 128, 2 * 2 * 64 * 128, 2 * 2 * 1024 * 128
    flat = found.flat.by_op()["target_attention"]
    assert flat.intensity == pytest.approx(flops / (own + keys))
    assert flat.intensity == pytest.approx(60, abs=0.5)
    maps = 4 / 2  # an item's share of the map, for each head
    assert found.tree.total.intensity == pytest.approx(flops / (own + keys / 70 + maps))
    assert found.tree.total.intensity == pytest.approx(833, abs=2)


def test_target_attention_bytes():
    found = analysis.target_attention(TREE, {"user": [3, 1], "item": 2}, level="item", dim=8)
    assert numbers(found.tree) == [
        ("target_attention", "user", 0, 4 * (3 + 1) * 16 + 4 * 5),
        ("target_attention", "item", 0, 4 * 5 * 2 * 16),
        ("target_attention", "item", 2 * (3 * 3 + 2 * 1 + 5 * 2) * 16, 4 * 5 * 16),
    ]
    met = 3 * 3 + 2 * 1 + 5 * 2
    assert numbers(found.flat) == [
        ("broadcast", "user", 0, 4 * (4 + 11) * 16 + 4 * 5),
        ("concatenate", "item", 0, 2 * 4 * met * 16),
        ("target_attention", "item", 2 * met * 16, 4 * 5 * 16 + 4 * met * 16),
    ]


@pytest.mark.parametrize("op", [analysis.add, analysis.mul])
def test_add_and_mul_meet_at_coarse_rows(op):
    found = op(TREE, NAMES, 8, dtype=HALF)
    name = op.__name__
    assert numbers(found.tree) == [
        (name, "vendor", 3 * 8, 2 * 3 * 8 + 2 * 2 * 8 + 4 * 3 + 4 * 3 * 8),
        (name, "item", 5 * 8, 2 * 5 * 8 + 4 * 3 * 8 + 4 * 5 + 2 * 5 * 8),
    ]
    assert numbers(found.flat)[-1] == (name, "item", 2 * 5 * 8, 4 * 2 * 5 * 8)
    assert [step.level for step in found.flat.steps] == ["user", "vendor", "item"]


def test_gate():
    found = analysis.gate(TREE, 8, level="item", of="user", dtype=HALF)
    assert numbers(found.tree) == [
        ("activation", "user", 2 * 8, 2 * 8 * (2 + 4)),
        ("gate", "item", 5 * 8, 2 * 5 * 8 + 4 * 2 * 8 + 4 * 5 + 2 * 5 * 8),
    ]
    assert numbers(found.flat) == [
        ("broadcast", "user", 0, 2 * 2 * 8 + 4 * 5 + 2 * 5 * 8),
        ("activation", "item", 5 * 8, 2 * 2 * 5 * 8),
        ("gate", "item", 5 * 8, 3 * 2 * 5 * 8),
    ]


def test_gates_may_be_the_finer_ones_or_at_the_same_level():
    finer = analysis.gate(TREE, 8, level="user", of="item")
    activation = Cost(5 * 8, 4 * (2 * 5 * 8))
    product = Cost(5 * 8, 4 * (5 * 8 + 2 * 8 + 5 * 8) + 4 * 5)
    assert finer.tree.by_level() == {"item": activation.plus(product)}
    alike = analysis.gate(TREE, 8, level="item", of="item")
    assert alike.tree.total == alike.flat.total == Cost(2 * 5 * 8, 5 * 4 * 5 * 8)


@pytest.mark.parametrize("shift", [True, False])
def test_film(shift):
    found = analysis.film(TREE, 8, level="item", of="user", shift=shift)
    read = (1 + shift) * (4 * 2 * 8 + 4 * 5)
    assert numbers(found.tree) == [("film", "item", (1 + shift) * 5 * 8, 4 * 2 * 5 * 8 + read)]
    assert len(found.flat.steps) == 2 + shift
    assert found.flat.steps[-1].cost == Cost((1 + shift) * 5 * 8, (3 + shift) * 4 * 5 * 8)


def test_layer_norm():
    found = analysis.layer_norm(TREE, {"user": 4, "item": 2})
    assert numbers(found.tree) == [
        ("layer_norm", "user", 0, 4 * 2 * 4 + 4 * 5),
        ("layer_norm", "item", 8 * 5 * 6, 4 * 5 * (2 + 6) + 2 * 6 * 4),
    ]
    assert found.flat.steps[-1].cost == Cost(8 * 5 * 6, 2 * 4 * 5 * 6 + 2 * 6 * 4)


def test_rms_norm():
    found = analysis.rms_norm(TREE, {"user": 4, "item": 2}, affine=False)
    assert found.tree.total.flops == found.flat.total.flops == 3 * 5 * 6
    assert found.flat.steps[-1].cost.bytes == 2 * 4 * 5 * 6


def test_dot_interaction_bytes():
    """Users have 2 fields: 1 pair; items have 1, which meets both."""
    found = analysis.dot_interaction(TREE, {"user": 2, "item": 1}, 8, dtype=HALF)
    assert numbers(found.tree) == [
        ("dot_interaction", "user", 2 * 2 * 2 * 2 * 8, 2 * 2 * 2 * 8 + 4 * 2 * 1),
        (
            "dot_interaction",
            "item",
            2 * 5 * 1 * 3 * 8,
            2 * 5 * 8 + (2 * 2 * 2 * 8 + 4 * 5) + (4 * 2 * 1 + 4 * 5) + 2 * 5 * 3,
        ),
    ]
    assert found.flat.steps[-1].cost == Cost(2 * 5 * 3 * 3 * 8, 2 * 5 * (3 * 8 + 3))


def test_factorization_machine():
    found = analysis.factorization_machine(TREE, {"user": 2, "item": 1}, 8)
    assert numbers(found.tree) == [
        ("factorization_machine", "user", 3 * 3 * 2 * 8, 4 * 2 * 2 * 8 + 2 * 4 * 2 * 8),
        (
            "factorization_machine",
            "item",
            (3 * 2 + 4) * 5 * 8,
            4 * 5 * 8 + (2 * 4 * 2 * 8 + 4 * 5) + 4 * 5 * 8,
        ),
    ]
    assert found.flat.steps[-1].cost == Cost(3 * 4 * 5 * 8, 4 * 5 * 4 * 8)


def test_cross_bytes():
    u, v = (torch.empty(size, device="meta") for size in ((6, 3), (3, 6)))
    layer = LowRankCross(u, v)
    found = analysis.cross(TREE, {"user": 4, "item": 2}, [layer, layer])
    times = [cost for op, cost in found.tree.by_op().items() if "times" in op]
    assert [cost.flops for cost in times] == [5 * (2 * 18 + 12)] * 2
    # The first reads x0, writes x; the second reads both.
    assert [cost.bytes for cost in times] == [4 * 5 * (2 * 6 + 3), 4 * 5 * (3 * 6 + 3)]
    assert [step.op for step in found.flat.steps[:2]] == ["broadcast", "concatenate"]


def test_broadcast_is_the_copy_in_both_forms():
    found = analysis.broadcast(TREE, 8, level="user", to="item", dtype=HALF)
    assert found.tree == found.flat
    assert numbers(found.tree) == [("broadcast", "user", 0, 2 * 2 * 8 + 4 * 5 + 2 * 5 * 8)]


def test_segment_ops():
    sizes = {"level": "item", "of": "user", "dtype": HALF}
    reduced = analysis.reduce(TREE, 8, level="item", to="user", dtype=HALF)
    assert numbers(reduced.tree) == [("reduce", "item", 40, 2 * 7 * 8 + 4 * 3)]
    softmax = analysis.segment_softmax(TREE, 8, **sizes)
    assert numbers(softmax.tree) == [("segment_softmax", "item", 40, 2 * 2 * 5 * 8 + 4 * 3)]
    best = analysis.segment_topk(TREE, 3, **sizes)
    assert numbers(best.flat) == [("segment_topk", "item", 5, 2 * 5 + 2 * 3 * (2 + 8) + 4 * 3)]
    lists = analysis.listwise_softmax_loss(TREE, **sizes)
    assert lists.tree.total == Cost(5, 2 * (2 * 5 + 2) + 4 * 3)
    pairs = analysis.pairwise_logistic_loss(TREE, **sizes)
    assert pairs.tree.total == Cost(3 + 1, 2 * (2 * 5 + 2) + 4 * 3)


def test_embedding_reads_no_more_rows_than_the_table_has():
    found = analysis.embedding(TREE, 8, level="user", to="item", ids=3, vocabulary=10)
    assert numbers(found.tree) == [("embedding", "user", 0, 8 * 6 + 4 * (6 + 6) * 8)]
    assert numbers(found.flat) == [
        ("broadcast", "user", 0, 8 * 2 * 3 + 4 * 5 + 8 * 5 * 3),
        ("embedding", "item", 0, 8 * 15 + 4 * (15 + 10) * 8),
    ]


def test_pools():
    found = analysis.pool(TREE, [4, 1], 8, level="user", to="item")
    assert numbers(found.tree) == [("pool", "user", 5 * 8, 4 * (5 * 8 + 2 * 8))]
    copied = 3 * 4 + 2 * 1
    assert numbers(found.flat) == [
        ("broadcast", "user", 0, 4 * (5 + copied) * 8 + 4 * 5),
        ("pool", "item", copied * 8, 4 * (copied * 8 + 5 * 8)),
    ]
    alone = analysis.attention_pool(TREE, 4, 8, level="user", heads=2)
    assert alone.tree == alone.flat
    assert alone.tree.total == Cost(2 * 8 * 16, 4 * (8 * 18 + 2 * 16))


def test_a_history_of_a_table():
    tree = TREE.with_table("brand", of="item", index=[1, 0, 1, 1, 0], rows=2)
    found = analysis.pool(tree, [4, 1], 8, level="brand", to="item")
    assert found.flat.steps[-1].cost.flops == (2 * 4 + 3 * 1) * 8


def test_no_rows_cost_nothing():
    tree = BroadcastTree.from_counts({"item": []}, root="user")
    found = analysis.linear(tree, {"user": 4, "item": 2}, 6)
    assert found.flat.total.flops == found.tree.total.flops == 0
    attention = analysis.target_attention(tree, {"user": 9}, level="item", dim=8)
    assert attention.tree.total == Cost()
    assert attention.tree.total.intensity == 0


def test_what_does_not_fit_is_named():
    with pytest.raises(TreeError, match=r'keys\["user"\] must have 2 entries for \'user\'; got 3'):
        analysis.target_attention(TREE, {"user": [1, 2, 3]}, level="item", dim=8)
    with pytest.raises(TreeError, match="lengths must not be negative; got -1"):
        analysis.pool(TREE, -1, 8, level="user")
    with pytest.raises(TreeError, match="widths must name one of the levels"):
        analysis.linear(TREE, {"shop": 4}, 6)
