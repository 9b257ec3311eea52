"""What only a GPU can show of the Hopper kernel: graphs, waiting, streams, compiling, addresses."""

import pytest
import torch
from linear_device import moved
from linear_naive import make, results
from triton import knobs

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

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


def tree_of(vendors, items):
    counts = {"vendor": vendors, "item": items}
    return BroadcastTree.from_counts(counts, root="user", capacity=CAPACITY)


def maps_of(tree):
    """The buffer that all maps of a tree are views of; of one layout where capacities agree."""
    return tree.live("user").untyped_storage()


def step(x, weight, bias, grad, tree):
    """Forward and backward on a tree, with plain gradients."""
    leaves = [t.detach().requires_grad_() for t in (*x.values(), *weight.values(), bias)]
    given = dict(zip(x, leaves, strict=False))
    weights = dict(zip(weight, leaves[len(x) : -1], strict=True))
    out = ikbo.linear(given, weights, tree=tree, bias=leaves[-1], impl="gluon")
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("N", [264, 9])
def test_a_graph_captured_at_capacity_serves_smaller_trees(dtype, N):
    full = tree_of([3, 2, 3, 2, 3, 2, 3, 2], [15] * 20).to("cuda")
    call = moved(make("linear", full.to("cpu"), WIDTHS, dtype=dtype, N=N), "cuda")
    x, weight, bias, grad = call.x, call.weight, call.bias, call.grad
    step(x, weight, bias, grad, full)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(x, weight, bias, grad, full)
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
        for got, expected in zip(kept, step(x, weight, bias, grad, smaller), strict=True):
            assert torch.equal(got, expected)
            assert not got.isnan().any()


def test_nothing_waits_for_the_device():
    tree = tree_of([2, 1], [30, 0, 4]).to("cuda")
    call = moved(make("linear", tree.to("cpu"), WIDTHS, dtype=torch.float16, N=48), "cuda")
    call.tree = tree
    call.run("gluon")
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run("gluon")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_trees_compile_nothing(monkeypatch):
    compiled = []
    for vendors, items in SHRINKING:
        call = make("linear", tree_of(vendors, items), WIDTHS, dtype=torch.float16, N=48)
        results(moved(call, "cuda"), "gluon")
        monkeypatch.setattr(
            knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"])
        )
    assert compiled == []


def large(rows=512):
    """More tiles than multiprocessors, three levels; its call."""
    counts = {"vendor": [8] * 16, "item": [rows] * 128}
    tree = BroadcastTree.from_counts(counts, root="user").to("cuda")
    sizes = (("user", 1178), ("vendor", 512), ("item", 200))
    x = {n: torch.randn(tree.rows(n), k, device="cuda").half() for n, k in sizes}
    weight = {n: torch.randn(512, t.shape[1], device="cuda").half() / 30 for n, t in x.items()}

    def run():
        return ikbo.linear(x, weight, tree=tree, impl="gluon")

    return run


def test_many_rounds_have_the_same_bits():
    """Whose timing differs from round to round; tickets and counters are left as they should be."""
    run = large()
    first = run()
    for _ in range(50):
        assert torch.equal(run(), first)


def test_two_streams_do_not_block_each_other():
    """Two grids want all multiprocessors at a time, so neither has all of its programs running."""
    run = large(256)
    expected = run()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


def test_graphs_may_run_at_the_same_time():
    """Each captured call has tickets and counters of its own."""
    run = large(64)
    expected = run()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        graphs.append((graph, out, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, _, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for _, out, _ in graphs)


def test_results_past_two_to_the_31():
    """The last rows of a result of more than 2^31 elements."""
    rows, width = 2_200_000, 1024
    tree = BroadcastTree.from_counts({"item": [rows - 1, 1]}, root="user").to("cuda")
    x = {n: torch.randn(tree.rows(n), 8, device="cuda").half() for n in tree.levels}
    weight = {n: torch.randn(width, 8, device="cuda").half() for n in tree.levels}
    out = ikbo.linear(x, weight, tree=tree, impl="gluon")
    assert out.numel() > 2**31
    for row, user in ((0, 0), (rows - 1, 1)):
        want = weight["user"].float() @ x["user"][user].float()
        want += weight["item"].float() @ x["item"][row].float()
        torch.testing.assert_close(out[row].float(), want, rtol=2e-3, atol=1e-2)
