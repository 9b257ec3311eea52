"""What only a GPU shows of the `reference` and `torch` paths of the linear ops."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from linear_naive import DTYPES, IMPLS, OPS, calls, check, make, moved, results

from ikbo_tree import BroadcastTree
from ikbo_tree.ops.linear import _stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

every_op = pytest.mark.parametrize("op", OPS)
every_impl = pytest.mark.parametrize("impl", IMPLS)
CAPACITY = {"user": 8, "vendor": 12, "item": 64}


def tree_of(vendors, items, capacity=CAPACITY):
    counts = {"vendor": vendors, "item": items}
    return BroadcastTree.from_counts(counts, root="user", root_rows=len(vendors), capacity=capacity)


@every_impl
@given(case=calls())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_against_loops(impl, case):
    call, wanted = case
    check(call, impl, wanted, device="cuda")


@every_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_sums(op, dtype):
    """Long rows, wide outputs and many of them: where a GEMM may split its sum."""
    tree = BroadcastTree.from_counts({"item": [300, 1, 0, 211]}, root="user")
    call = make(op, tree, {"user": 1178, "item": 866}, dtype=dtype, M=24, N=32)
    check(call, device="cuda")


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_op
@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_nothing_waits_for_the_device(op, capacity, dtype):
    tree = tree_of([2, 0, 1], [30, 0, 12], capacity)
    call = moved(make(op, tree, {"user": 8, "vendor": 3, "item": 16}, dtype=dtype), "cuda")
    results(call)
    with waiting_is_an_error():
        results(call)


@every_op
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_graph_captured_at_capacity_serves_smaller_trees(op, dtype):
    """Forward and backward, with NaN in what dead rows hold when it is replayed."""
    widths = {"user": 8, "vendor": 3, "item": 16}
    full = moved(make(op, tree_of([2] * 6, [5] * 12), widths, dtype=dtype), "cuda")
    dims = "[rows, K]" if op == "linear" else "[rows, K, N]"
    x, weight, consumer, *maps = _stages(full.x, full.weight, full.tree, None, dims)
    maps = [[None if t is None else t.clone() for t in tensors] for tensors in maps]
    bias = (full.bias,) if op == "linear" else ()
    leaves = [t.requires_grad_() for t in (*x, *weight, *bias)]
    function = getattr(torch.ops.ikbo_tree, op)

    def step():
        out = function(x, weight, *bias, consumer, *maps, None, "torch")
        return out, *torch.autograd.grad(out, leaves, full.grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for vendors, items in (([2] * 6, [5] * 12), ([1, 0, 2], [3, 0, 7]), ([], [])):
        call = make(op, tree_of(vendors, items), widths, dtype=dtype, seed=len(items))
        there = moved(call, "cuda")
        other = _stages(there.x, there.weight, there.tree, None, dims)
        with torch.no_grad():
            new = (*other[0], *other[1], *([there.bias] if bias else []))
            for mine, theirs in zip(leaves, new, strict=True):
                mine.copy_(theirs)
            full.grad.copy_(there.grad)
            for mine, theirs in zip(maps, other[3:], strict=True):
                for one, two in zip(mine, theirs, strict=True):
                    if one is not None:
                        one.copy_(two)
        graph.replay()
        expected = results(there)
        for value, name in zip(captured, ("out", *there.inputs), strict=True):
            torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")
