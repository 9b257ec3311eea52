"""Calls of `linear` and `linear_compression` on the device under test, held to their budgets."""

from linear_naive import Call, exact, flat, results, terms

from ikbo_tree import BroadcastTree
from ikbo_tree.testing.budget import assert_within_budget


def moved(call, device):
    """The same call on a device."""
    there = Call(**vars(call))
    there.tree = call.tree.to(device)
    there.x = {n: t.to(device) for n, t in call.x.items()}
    there.weight = {n: t.to(device) for n, t in call.weight.items()}
    there.bias = None if call.bias is None else call.bias.to(device)
    there.grad = call.grad.to(device)
    return there


def check(call, device, **options):
    """Result and gradients on the device against their budgets."""
    found = results(moved(call, device), "triton", **options)
    right = exact(call)
    near, sizes = flat(call), terms(call)
    for name, value in found.items():
        assert value.dtype == call.grad.dtype
        assert value.is_contiguous()
        rows = name == "out" or name[0] == "x"
        assert_within_budget(
            value, right[name], near[name], name=name, rows=rows, terms=sizes[name]
        )
    return found


def three_levels(**options):
    return BroadcastTree.from_counts(
        {"vendor": [2, 0, 1], "item": [3, 0, 2]}, root="user", **options
    )
