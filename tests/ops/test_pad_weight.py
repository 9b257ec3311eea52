"""Weights in aligned rows: the same values and gradients, and ops take them (contract 10)."""

import pytest
import torch

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree


def lies_well(w):
    unit = 16 // w.element_size()
    steps = [s for s, n in zip(w.stride()[:-1], w.shape[:-1], strict=True) if n > 1]
    return w.stride(-1) == 1 and w.data_ptr() % 16 == 0 and all(s % unit == 0 for s in steps)


VIEWS = {
    "odd width": lambda: torch.randn(7, 13),
    "even width": lambda: torch.randn(7, 866),
    "transposed": lambda: torch.randn(24, 8).t(),
    "begins at an odd place": lambda: torch.randn(3, 17)[:, 1:],
    "first column": lambda: torch.randn(9, 4)[:, :1],
    "heads": lambda: torch.randn(2, 5, 9),
    "no columns": lambda: torch.randn(4, 0),
    "no rows": lambda: torch.randn(0, 5),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", VIEWS)
def test_the_same_values_in_rows_that_lie_well(name, dtype):
    w = VIEWS[name]().to(dtype)
    found = ikbo.pad_weight(w)
    assert found.dtype == dtype
    assert torch.equal(found, w)
    assert found.numel() == 0 or lies_well(found)


def test_what_lies_well_is_left_alone():
    for w in (
        torch.randn(3, 8),
        torch.randn(3, 16, dtype=torch.float16),
        torch.randn(5, 12)[:, :9],
    ):
        assert ikbo.pad_weight(w) is w


def test_gradients_pass():
    w = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ikbo.pad_weight(x).sin(), w)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_ops_take_it(impl):
    tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
    e = {"user": torch.randn(3, 13, 8), "item": torch.randn(5, 7, 8)}
    w = {"user": torch.randn(6, 13), "item": torch.randn(6, 7)}
    padded = {name: ikbo.pad_weight(x) for name, x in w.items()}
    call = lambda w: ikbo.linear_compression(e, w, tree=tree, impl=impl)  # noqa: E731
    assert torch.allclose(call(padded), call(w), rtol=1e-6, atol=1e-6)
    x = {name: t[..., 0] for name, t in e.items()}
    call = lambda w: ikbo.linear(x, w, tree=tree, impl=impl)  # noqa: E731
    assert torch.allclose(call(padded), call(w), rtol=1e-6, atol=1e-6)
