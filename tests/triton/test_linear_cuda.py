"""What only a GPU can show of the matrix kernels: graphs, waiting, compiling, addresses."""

import pytest
import torch
from linear_device import check, moved
from linear_naive import OPS, make, results
from triton import knobs

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree

pytestmark = pytest.mark.gpu

CAPACITY = {"user": 8, "vendor": 20, "item": 300}
WIDTHS = {"user": 40, "vendor": 24, "item": 70}
SHRINKING = [
    ([4, 3, 1], [60, 0, 20, 30, 41, 7, 9, 3]),
    ([1, 0, 2], [1, 17, 200]),
    ([1], [1]),
    ([2, 0], [0, 0]),
    ([], []),
]
"""Vendors a user and items a vendor of trees within the capacity; the last has no row at all."""

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def tree_of(vendors, items):
    counts = {"vendor": vendors, "item": items}
    return BroadcastTree.from_counts(counts, root="user", capacity=CAPACITY)


def maps_of(tree):
    """The buffer that all maps of a tree are views of; of one layout where capacities agree."""
    return tree.live("user").untyped_storage()


def step(op, x, weight, grad, tree):
    """Forward and backward on a tree, with plain gradients."""
    leaves = [t.detach().requires_grad_() for t in (*x.values(), *weight.values())]
    given = dict(zip(x, leaves, strict=False))
    weights = dict(zip(weight, leaves[len(x) :], strict=True))
    out = getattr(ikbo, op)(given, weights, tree=tree, impl="triton")
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@every_op
@every_dtype
def test_a_graph_captured_at_capacity_serves_smaller_trees(op, dtype):
    full = tree_of([3, 2, 3, 2, 3, 2, 3, 2], [15] * 20).to("cuda")
    call = moved(make(op, full.to("cpu"), WIDTHS, dtype=dtype, M=50, N=48, bias=False), "cuda")
    x, weight, grad = call.x, call.weight, call.grad
    step(op, x, weight, grad, full)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(op, x, weight, grad, full)
    for vendors, items in SHRINKING:
        smaller = tree_of(vendors, items).to("cuda")
        maps_of(full).copy_(maps_of(smaller))
        for name, value in x.items():
            value.normal_()
            value[smaller.rows(name) :] = torch.nan
        grad.normal_()
        grad[smaller.rows("item") :] = torch.nan
        for tensor in kept:
            tensor.fill_(torch.nan)
        graph.replay()
        for got, expected in zip(kept, step(op, x, weight, grad, smaller), strict=True):
            assert torch.equal(got, expected)
            assert not got.isnan().any()


@every_op
def test_nothing_waits_for_the_device(op):
    tree = tree_of([2, 1], [30, 0, 4]).to("cuda")
    call = moved(make(op, tree.to("cpu"), WIDTHS, dtype=torch.float16, M=50, N=48), "cuda")
    call.tree = tree
    for tensor in call.inputs.values():
        tensor.requires_grad_()

    def run():
        out = call.run("triton")
        torch.autograd.grad(out, list(call.inputs.values()), call.grad)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_op
def test_other_trees_compile_nothing(op, monkeypatch):
    compiled = []
    for vendors, items in SHRINKING:
        tree = tree_of(vendors, items)
        call = moved(make(op, tree, WIDTHS, dtype=torch.float16, M=50, N=48), "cuda")
        results(call, "triton")
        monkeypatch.setattr(
            knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"])
        )
    assert compiled == []


@every_op
@every_dtype
@pytest.mark.parametrize(
    ("widths", "M", "N"),
    [
        ({"user": 1178, "item": 866}, 433, 256),
        ({"user": 20, "item": 511}, 433, 24),
        ({"user": 511, "item": 20}, 8, 466),
        ({"user": 1, "item": 65}, 1, 1),
    ],
    ids=str,
)
def test_awkward_sizes(op, dtype, widths, M, N):
    tree = BroadcastTree.from_counts({"item": [3, 1, 0, 9]}, root="user")
    check(make(op, tree, widths, dtype=dtype, M=M, N=M if op == "linear" else N), "cuda")


@every_op
def test_results_past_two_to_the_31(op):
    """The last rows of a result of more than 2^31 elements, and of its gradient."""
    rows, width = (2_200_000, 1024) if op == "linear" else (22_000, 400)
    N = () if op == "linear" else (256,)
    tree = BroadcastTree.from_counts({"item": [rows - 1, 1]}, root="user").to("cuda")
    x = {n: torch.randn(tree.rows(n), 8, *N, device="cuda").half() for n in tree.levels}
    weight = {n: torch.randn(width, 8, device="cuda").half() for n in tree.levels}
    leaves = [x["item"].requires_grad_(), weight["item"].requires_grad_()]
    out = getattr(ikbo, op)(x, weight, tree=tree, impl="triton")
    assert out.numel() > 2**31
    with torch.no_grad():
        for row, user in ((0, 0), (rows - 1, 1)):
            want = weight["user"].float() @ x["user"][user].float()
            want += weight["item"].float() @ x["item"][row].float()
            torch.testing.assert_close(out[row].float(), want, rtol=2e-3, atol=1e-2)
    grad = torch.zeros_like(out)
    grad[-1] = 1
    dx, dweight = torch.autograd.grad(out, leaves, grad)
    with torch.no_grad():
        want = weight["item"].float().sum(0)
        got = dx[-1].float() if op == "linear" else dx[-1, :, 0].float()
        torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-1)
        assert not dx[:-1].any()
        last = x["item"][-1].float()
        want = last if op == "linear" else last.sum(1)
        torch.testing.assert_close(dweight[0].float(), want, rtol=2e-3, atol=5e-2)
