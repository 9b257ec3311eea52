"""Generated requests follow the distributions that their module names."""

import numpy as np
import torch

from ikbo_tree.demo.traffic import Distributions, Traffic


def counts(requests):
    return requests.tree.offsets("item", of="user").diff().double().numpy()


def test_candidates_a_user_are_log_normal():
    requests = Traffic(0).requests(400, 60)
    n = counts(requests)
    assert n.min() >= 1
    assert abs(n.mean() / 60 - 1) < 0.02
    # The deviation of 400 logarithms has a standard error of 3.5 %.
    assert abs(np.log(n).std() / 0.8 - 1) < 0.12
    assert abs(np.log(n).mean() - (np.log(60) - 0.8**2 / 2)) < 4 * 0.8 / 400**0.5


def test_vendors_are_zipf():
    """At few candidates a user, draws without replacement are nearly independent."""
    d = Distributions(zipf=1.1, vendors=100, items_per_vendor=100)
    requests = Traffic(0, d).requests(800, 10)
    vendor = requests.tree.keys("vendor")[requests.tree.parents("item").numpy()]
    drawn = np.bincount(vendor, minlength=100)
    p = 1 / np.arange(1, 101) ** 1.1
    expected = p / p.sum() * len(vendor)
    # Pearson's statistic of 99 degrees of freedom lies below 149 in 99.9 % of the cases.
    assert ((drawn - expected) ** 2 / expected).sum() < 149


def test_a_request_has_no_item_twice_and_belongs_to_its_vendor():
    requests = Traffic(3).requests(20, 200)
    tree = requests.tree
    user, item = tree.ancestors("item", of="user").numpy(), tree.keys("item")
    assert len(set(zip(user.tolist(), item.tolist(), strict=True))) == len(item)
    assert (tree.keys("vendor")[tree.parents("item").numpy()] == item // 50).all()
    assert tree.is_sorted


def test_extreme_ratios():
    one = Traffic(0).requests(1, 10_000)
    assert one.tree.rows("item") == 10_000
    beyond = Traffic(0, Distributions(vendors=3, items_per_vendor=2)).requests(2, 1000)
    assert beyond.tree.rows("item") == 12


def test_shapes_and_lengths():
    requests = Traffic(0).requests(50, 5)
    for name, x in requests.inputs.items():
        rows = requests.tree.rows(name)
        assert len(x.features) == len(x.tokens) == rows
        if x.history is not None:
            assert len(x.history) == len(x.lengths) == rows
            assert x.lengths.min() >= 0
            assert x.lengths.max() <= x.history.shape[1]
    assert requests.inputs["user"].lengths.min() < 5
    assert requests.labels.shape == (requests.tree.rows("item"),)
    assert set(requests.labels.tolist()) == {0.0, 1.0}


def test_everything_follows_from_seed_and_number():
    def same(a, b):
        return a.tree == b.tree and all(
            torch.equal(a.inputs[n].tokens, b.inputs[n].tokens)
            and torch.equal(a.inputs[n].features, b.inputs[n].features)
            for n in a.inputs
        )

    first = Traffic(5).requests(8, 12, 1)
    assert same(first, Traffic(5).requests(8, 12, 1))
    assert not same(first, Traffic(5).requests(8, 12, 2))
    assert not same(first, Traffic(6).requests(8, 12, 1))
