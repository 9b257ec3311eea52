"""Merged batches: equal coarse rows once, parts of large requests, buffers without stale rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serving.cases import CAPACITY, SIGNATURE, Peers, Toy, oracle, request, runner

from ikbo_tree import TreeError
from ikbo_tree.serving import GraphRunner, ScoringError, TooLargeError, TreeBuffers, check
from ikbo_tree.serving.merge import cut, merge

WIDE = {"user": 64, "vendor": 256, "item": 1024}


def checked(*requests):
    return [check(x, SIGNATURE) for x in requests]


def same_user(first, second, *, change=0.0):
    """`second` with the key and features of the user of `first`, or nearly."""
    x = first.inputs["user_x"].clone()
    x[0, 0] += change
    return replace(second, inputs={**second.inputs, "user_x": x}, keys=first.keys)


def test_each_gets_its_own_scores():
    asked = [request(seed, users=1 + seed % 3) for seed in range(12)]
    merged = merge(SIGNATURE, checked(*asked))
    split = merged.split(runner(capacity=WIDE).run(merged).scores)
    for x, scores in zip(asked, split, strict=True):
        np.testing.assert_array_equal(scores.numpy(), oracle(x))


@pytest.mark.parametrize("key", [7, "seven", -(2**62)])
def test_the_same_user_is_one_row(key):
    first = request(1, key=key)
    asked = [first, request(2, key="other" if isinstance(key, str) else 8)]
    asked.append(same_user(first, request(3)))
    merged = merge(SIGNATURE, checked(*asked))
    assert merged.rows["user"] == 3
    assert merged.rows["person"] == 2
    scores = runner(capacity=WIDE).run(merged).scores
    np.testing.assert_array_equal(scores.numpy(), np.concatenate([oracle(x) for x in asked]))


def test_a_key_with_other_features_is_another_row():
    first = request(1, key=7)
    asked = [first, same_user(first, request(3), change=1.0), same_user(first, request(4))]
    merged = merge(SIGNATURE, checked(*asked))
    assert merged.tables["person"].index.tolist() == [0, 1, 0]
    scores = runner(capacity=WIDE).run(merged).scores
    np.testing.assert_array_equal(scores.numpy(), np.concatenate([oracle(x) for x in asked]))


def test_zeros_of_both_signs_are_other_features():
    first = request(1, key=7)
    first.inputs["user_x"][0, 0] = 0.0
    second = same_user(first, request(2))
    second.inputs["user_x"][0, 0] = -0.0
    assert merge(SIGNATURE, checked(first, second)).rows["person"] == 2


def test_rows_without_keys_are_not_shared():
    first = request(1)
    assert merge(SIGNATURE, checked(first, first)).rows["person"] == 2
    keyed = replace(first, keys={"user": [3]})
    assert merge(SIGNATURE, checked(keyed, first, keyed)).rows["person"] == 2


def test_keys_of_all_types_meet():
    """NumPy makes floats of int64 beside uint64, and strings of both beside strings."""
    first = request(1)
    keys = [2**53, 2**53 + 1, np.uint64(2**63), "9007199254740992"]
    asked = [replace(request(i), keys={"user": [key]}) for i, key in enumerate(keys)]
    asked.append(replace(first, keys={"user": np.array([2**63 + 1], dtype=np.uint64)}))
    merged = merge(SIGNATURE, checked(*asked))
    scores = runner(capacity=WIDE).run(merged).scores
    np.testing.assert_array_equal(scores.numpy(), np.concatenate([oracle(x) for x in asked]))


def test_a_shared_user_does_not_mix_candidates():
    """What makes tables right where one root row for both requests would be wrong."""
    signature = replace(SIGNATURE, independent=False)
    first = request(1, key=7)
    asked = [first, same_user(first, request(3))]
    merged = merge(signature, [check(x, signature) for x in asked])
    assert merged.rows["person"] == 1
    scores = runner(Peers().eval(), signature, WIDE).run(merged).scores
    expected = np.concatenate([oracle(x, "peers") for x in asked])
    np.testing.assert_array_equal(scores.numpy(), expected)


def test_bytes_that_are_not_moved():
    merged = merge(SIGNATURE, checked(request(1)))
    rows = merged.rows
    expected = (rows["item"] - 1) * 12 + max(rows["item"] - rows["vendor"], 0) * 8
    assert merged.bytes_not_moved == expected > 0


@pytest.mark.parametrize("seed", range(6))
def test_a_large_request_in_parts(seed):
    """Even one vendor with more items than fit, beside others."""
    big = request(seed, users=6, vendors=5, items=8 if seed else 60)
    parts = cut(SIGNATURE, *checked(big), CAPACITY)
    assert len(parts) > 1
    scores = []
    for part in parts:
        assert all(part.rows[level] <= CAPACITY[level] for level in CAPACITY)
        scores.append(runner().run(merge(SIGNATURE, [part])).scores)
    np.testing.assert_array_equal(torch.cat(scores).numpy(), oracle(big))


def test_root_rows_alone_can_be_too_many():
    counts = {"vendor": [0] * 40, "item": []}
    inputs = {
        name: torch.zeros((40 if name == "user_x" else 0, *given.shape), dtype=given.dtype)
        for name, given in SIGNATURE.inputs.items()
    }
    (part,) = cut(SIGNATURE, *checked(replace(request(0), counts=counts, inputs=inputs)), CAPACITY)
    assert part.rows == {"user": 0, "vendor": 0, "item": 0}


def test_candidates_that_see_each_other_stay_together():
    signature = replace(SIGNATURE, independent=False)
    many = request(2, users=9)
    peers = runner(Peers().eval(), signature)
    parts = cut(signature, check(many, signature), CAPACITY)
    scores = torch.cat([peers.run(merge(signature, [part])).scores for part in parts])
    np.testing.assert_array_equal(scores.numpy(), oracle(many, "peers"))
    with pytest.raises(TooLargeError):
        cut(signature, check(request(2, items=60), signature), CAPACITY)


@pytest.mark.parametrize("fixed", [False, True])
def test_nothing_of_a_larger_batch_is_left(fixed):
    buffers = TreeBuffers(SIGNATURE, WIDE, fixed=fixed)
    large = merge(SIGNATURE, checked(*(request(seed, users=3) for seed in range(9))))
    small = merge(SIGNATURE, checked(request(77)))
    for merged in (large, small, large, small):
        tree, inputs = buffers.fill(merged)
        for name, given in SIGNATURE.inputs.items():
            live = merged.rows[given.at]
            assert torch.equal(
                inputs[name][:live], torch.cat([part.inputs[name] for part in merged.parts])
            )
            assert len(inputs[name]) == tree.capacity(given.at)
            assert not buffers.inputs[name][live:].any()
    if fixed:
        again, _ = buffers.fill(large)
        assert again is tree  # what a graph was captured with
        assert tree.capacity("item") == WIDE["item"]
        assert int(tree.live("item")) == large.rows["item"]


def test_fixed_and_live_sizes_give_the_same():
    model = Toy().eval()
    fixed = GraphRunner(model, SIGNATURE, [CAPACITY, WIDE], fixed=True)
    for users in (20, 1, 5, 1, 20):
        asked = [request(users * 31 + i, key=i % 3) for i in range(users)]
        merged = merge(SIGNATURE, checked(*asked))
        expected = np.concatenate([oracle(x) for x in asked])
        np.testing.assert_array_equal(fixed.run(merged).scores.numpy(), expected)


def test_scores_are_no_view_of_a_buffer():
    class First(torch.nn.Module):
        def forward(self, tree, user_x, vendor_x, item_x, word):
            return item_x[:, 0]

    for fixed in (False, True):
        run = runner(First().eval(), fixed=fixed)
        first = run.run(merge(SIGNATURE, checked(request(1)))).scores
        kept = first.clone()
        run.run(merge(SIGNATURE, checked(request(2))))
        assert torch.equal(first, kept)


def test_a_model_with_other_rows_is_refused():
    class Wrong(torch.nn.Module):
        def forward(self, tree, user_x, vendor_x, item_x, word):
            return user_x[:, 0]

    with pytest.raises(ScoringError, match="'item'"):
        runner(Wrong().eval())


@pytest.mark.parametrize(
    "capacities",
    [
        [],
        {"user": 4, "vendor": 3},
        {**CAPACITY, "shop": 3},
        {**CAPACITY, "item": 0},
        [CAPACITY, {"user": 2, "vendor": 64, "item": 64}],
    ],
    ids=str,
)
def test_capacities_are_checked(capacities):
    with pytest.raises(TreeError):
        runner(capacity=capacities)
