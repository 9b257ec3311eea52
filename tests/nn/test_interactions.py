"""TreeCrossNet and TreeDotInteraction at any levels and tables; what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ikbo_tree import BroadcastTree
from ikbo_tree.nn import TreeCrossNet, TreeDotInteraction
from ikbo_tree.testing import check_model
from ikbo_tree.testing.cases import pick, reachable, some_of
from ikbo_tree.testing.strategies import trees
from nn.twins import Flat, OnTree, as_mapping, crossed, dotted


@pytest.mark.parametrize("kind", ["cross_net", "dot_interaction"])
@settings(max_examples=15)
@given(tree=trees(capacity=False, max_rows=60), seed=st.integers(0, 2**16))
def test_any_levels_and_tables(kind, tree, seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    level = pick(rng, tree.levels)
    widths = {n: pick(rng, [1, 3, 4]) for n in some_of(rng, reachable(tree, level))}
    total = sum(widths.values())
    if kind == "cross_net":
        flat, tail, call = nn.ModuleList([nn.Linear(total, total)] * 2), (), crossed
        module = TreeCrossNet.from_flat(flat, widths, level=level)
    else:
        flat, tail, call = nn.Identity(), (5,), dotted
        module = TreeDotInteraction(level=level)
    check_model(
        Flat(flat, call),
        OnTree(module, as_mapping),
        tree,
        {n: torch.randn(tree.rows(n), width, *tail) for n, width in widths.items()},
        levels={n: n for n in widths},
        to=level,
    )


def test_errors_are_in_the_callers_words():
    with pytest.raises(ValueError, match="must add up to the 8 in_features"):
        TreeCrossNet.from_flat(nn.ModuleList([nn.Linear(8, 8)]), {"user": 3})
    with pytest.raises(ValueError, match="must add up to the 4 out_features"):
        TreeCrossNet.from_flat(nn.ModuleList([nn.Linear(3, 4)]), {"user": 3})
    pair = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"flat\[0\] must be an nn.Linear, or .* without bias"):
        TreeCrossNet.from_flat(nn.ModuleList([pair]), {"user": 3})
    with pytest.raises(ValueError, match="order must be one of tril, triu; got 'both'"):
        TreeDotInteraction(order="both")


def test_columns_follow_the_widths_whatever_the_order_of_the_inputs():
    tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    net = TreeCrossNet({"user": 2, "item": 3}, layers=2)
    x = {"user": torch.randn(2, 2), "item": torch.randn(3, 3)}
    assert torch.equal(net(x, tree=tree), net(dict(reversed(x.items())), tree=tree))
