"""Peak memory, times in turns, AUC and its bound, agreement."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikbo_tree.demo.auc import auc, may_differ
from ikbo_tree.demo.cost import Cost, measure, peak_mb
from ikbo_tree.demo.training import agreement
from ikbo_tree.testing.budget import BudgetError

CPU = torch.device("cpu")


def mib(n):
    return torch.ones(n << 18)


def test_peak_counts_what_lives_at_one_time():
    def call():
        mib(4)
        x = mib(3)
        y = mib(2)
        del x
        mib(1)
        del y

    assert peak_mb(call, CPU) == pytest.approx(5, abs=0.01)
    assert peak_mb(lambda: None, CPU) == 0


def test_peak_counts_temporaries_inside_ops():
    x = torch.ones(1 << 18).requires_grad_()
    # exp saves its result, the sum's gradient is expanded, their product is the gradient.
    assert peak_mb(lambda: x.exp().sum().backward(), CPU) >= 2


def test_contenders_take_turns():
    order = []
    costs = measure(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, device=CPU
    )
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert all(len(cost.samples_ms) == 3 for cost in costs.values())


def test_ratios_are_taken_inside_rounds():
    slow, fast = Cost((10.0, 40.0, 12.0), 0.0), Cost((5.0, 10.0, 6.0), 0.0)
    assert fast.times_faster_than(slow) == 2.0
    assert slow.median_ms == 12.0


def test_auc_counts_pairs_in_order():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 30, 200) / 30, rng.integers(0, 2, 200)
    pairs = scores[labels == 1][:, None] - scores[labels == 0][None]
    by_hand = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    got = auc(torch.from_numpy(scores).float(), torch.from_numpy(labels))
    assert got == pytest.approx(by_hand, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-4, 0.5))
def test_auc_of_moved_scores_stays_within_the_bound(seed, far):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(60, generator=g)
    labels = (torch.rand(60, generator=g) < 0.5).float()
    labels[:2] = torch.tensor([0.0, 1.0])
    moved = scores + far * (2 * torch.rand(60, generator=g) - 1)
    apart = abs(auc(scores, labels) - auc(moved, labels))
    assert apart <= may_differ(scores, moved, labels)


def test_the_bound_of_equal_scores_is_rounding():
    scores = torch.arange(100.0)
    labels = (scores % 3 == 0).float()
    assert may_differ(scores, scores, labels) < 1e-5


def test_agreement_refuses_what_rounding_does_not_explain():
    exact = torch.linspace(0.7, 0.6, 30, dtype=torch.float64)
    flat = exact.float()
    found = agreement(flat, flat.clone(), exact, name="losses")
    assert found.difference == 0
    assert found.flat_error == found.tree_error <= found.bound
    off = flat.clone()
    off[7] += 1e-4
    with pytest.raises(BudgetError, match="losses"):
        agreement(flat, off, exact, name="losses")
