"""TreeLinear, TreeMLP and TreeLinearCompression at any levels and tables; what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.nn import TreeLinear, TreeLinearCompression, TreeMLP
from ikbo_tree.testing import check_model
from ikbo_tree.testing.cases import flag, pick, reachable, some_of
from ikbo_tree.testing.strategies import trees
from nn.twins import Flat, OnTree, as_mapping, compressed, mlp, side_by_side

TREE = BroadcastTree.from_counts({"item": [2, 1]}, root="user")


@pytest.mark.parametrize("kind", ["linear", "mlp", "linear_compression"])
@settings(max_examples=15)
@given(tree=trees(capacity=False, max_rows=60), seed=st.integers(0, 2**16))
def test_any_levels_and_tables(kind, tree, seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    level = pick(rng, tree.levels)
    widths = {n: pick(rng, [1, 4, 7]) for n in some_of(rng, reachable(tree, level))}
    total, tail, flat_call = sum(widths.values()), (), side_by_side
    if kind == "linear":
        flat, make = nn.Linear(total, 5, bias=flag(rng)), TreeLinear.from_flat
    elif kind == "mlp":
        flat, make = mlp(total, 5, 3), TreeMLP.from_flat
    else:
        flat, make = nn.Linear(total, 5, bias=False), TreeLinearCompression.from_flat
        tail, flat_call = (3,), compressed
    check_model(
        Flat(flat, flat_call),
        OnTree(make(flat, widths, level=level), as_mapping),
        tree,
        {n: torch.randn(tree.rows(n), width, *tail) for n, width in widths.items()},
        levels={n: n for n in widths},
        to=level,
    )


def test_columns_follow_the_widths_whatever_the_order_of_the_inputs():
    layer = TreeLinear({"user": 2, "item": 2}, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 1.0, 10.0, 10.0]])
    x = {"item": torch.ones(3, 2), "user": torch.ones(2, 2)}
    assert layer(x, tree=TREE).tolist() == [[22.0]] * 3


def test_a_checkpoint_of_the_flat_module_loads():
    flat = mlp(7, 5, 1)
    module = TreeMLP({"user": 3, "item": 4}, [5, 1], nn.SiLU)
    module.load_state_dict(flat.state_dict())
    x = {"user": torch.randn(2, 3), "item": torch.randn(3, 4)}
    whole = torch.cat([x["user"][[0, 0, 1]], x["item"]], dim=1)
    torch.testing.assert_close(module(x, tree=TREE), flat(whole))


def test_training_mode_is_taken_over():
    flat = nn.Sequential(nn.Linear(7, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()
    module = TreeMLP.from_flat(flat, {"user": 3, "item": 4})
    assert not module.training
    assert not module[0].training
    assert not module.to_flat().training


def test_errors_are_in_the_callers_words():
    layer = TreeLinear({"user": 3, "item": 4}, 5)
    x = {"user": torch.zeros(2, 3), "item": torch.zeros(3, 4)}
    with pytest.raises(TreeError, match=r"inputs must have the names \['user', 'item'\]"):
        layer({"user": x["user"]}, tree=TREE)
    with pytest.raises(TreeError, match=r'inputs\["item"\] must have 4 in dim 1; got .*\(3, 3\)'):
        layer({**x, "item": x["item"][:, :3]}, tree=TREE)
    with pytest.raises(ValueError, match="widths must name levels with at least one feature"):
        TreeLinear({}, 5)
    with pytest.raises(ValueError, match="must add up to the 8 in_features of the flat module"):
        TreeLinear.from_flat(nn.Linear(8, 5), {"user": 3, "item": 4})
    with pytest.raises(ValueError, match="flat must have no bias"):
        TreeLinearCompression.from_flat(nn.Linear(7, 5), {"user": 3, "item": 4})
    with pytest.raises(ValueError, match=r"flat must begin with an nn.Linear; got ReLU"):
        TreeMLP.from_flat(nn.Sequential(nn.ReLU()), {"user": 3})
    with pytest.raises(ValueError, match="features must have at least one width"):
        TreeMLP({"user": 3}, [])
