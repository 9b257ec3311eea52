"""What only a GPU can show of the segment kernels: graphs, waiting, compiling, addresses."""

import contextlib

import pytest
import torch
from triton import knobs

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.ops.segments import broadcast, reduce, segment_softmax

pytestmark = pytest.mark.gpu

USERS, ITEMS = 40, 3000
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp")
SHRINKING = [[70] * 20 + [1400] + [10] * 19, [3, 0, 2000, 1], [1], [0, 0, 0], []]
"""Counts of smaller and smaller trees; the last has no row at any level."""


def tree_of(counts, *, shuffled=False, capacity=True):
    spare = {"user": USERS, "item": ITEMS} if capacity else None
    if not shuffled:
        return BroadcastTree.from_counts({"item": counts}, root="user", capacity=spare)
    parents = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts).long())
    parents = parents[torch.randperm(len(parents), generator=torch.Generator().manual_seed(0))]
    return BroadcastTree.from_parents(
        {"item": parents}, root="user", root_rows=len(counts), capacity=spare
    )


def step(op, x, g, route):
    """Forward and backward of one op, on plain tensors."""
    ops = torch.ops.ikbo_tree
    if op == "broadcast":
        y = ops.broadcast(x, *route, "triton")
    elif op == "softmax":
        y = ops.segment_softmax(x, *route, "triton")
    else:
        y = ops.reduce(x, *route, op, "triton")
    return y, torch.autograd.grad(y, x, g[: y.shape[0]])[0]


def replace(route, other):
    """Writes another tree's maps of the same capacity over a route's."""
    for mine, theirs in zip(route, other, strict=True):
        if mine is None:
            assert theirs is None
        elif theirs is None:  # an order, of a tree that happens to be sorted
            torch.arange(len(mine), out=mine)
        else:
            mine.copy_(theirs)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("op", ["broadcast", *REDUCTIONS, "softmax"])
def test_a_graph_captured_at_capacity_serves_smaller_trees(op, shuffled):
    full = tree_of([ITEMS // USERS] * USERS, shuffled=shuffled).to("cuda").route("item", "user")
    route = Route(*(None if part is None else part.clone() for part in full))
    width = 24
    rows = USERS if op == "broadcast" else ITEMS
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.zeros(ITEMS, width, device="cuda", dtype=torch.bfloat16)
    step(op, x, g, route)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step(op, x, g, route)
    for counts in SHRINKING:
        smaller = tree_of(counts, shuffled=shuffled).to("cuda").route("item", "user")
        replace(route, smaller)
        with torch.no_grad():
            x.normal_()
            g.normal_()
            # Dead rows hold NaN: they must not be read.
            x[len(counts) if op == "broadcast" else sum(counts) :] = float("nan")
            g[sum(counts) if op in ("broadcast", "softmax") else len(counts) :] = float("nan")
            y.fill_(float("nan"))
            dx.fill_(float("nan"))
        graph.replay()
        want = step(op, x.detach().clone().requires_grad_(), g, smaller)
        for got, expected in zip((y, dx), want, strict=True):
            got, expected = got.detach(), expected.detach()
            assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
            assert not got.isnan().any()


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("impl", ["auto", "triton", "torch"])
def test_nothing_waits_for_the_device(impl):
    tree = tree_of([70, 0, 1400, 1]).to("cuda")
    user = torch.randn(USERS, 64, device="cuda", requires_grad=True)
    item = torch.randn(ITEMS, 64, device="cuda", requires_grad=True)

    def run():
        total = broadcast(user, tree=tree, level="user", to="item", impl=impl).sum()
        total = total + segment_softmax(item, tree=tree, level="item", of="user", impl=impl).sum()
        for op in REDUCTIONS:
            total = total + reduce(item, tree=tree, level="item", to="user", op=op, impl=impl).sum()
        torch.autograd.grad(total, (user, item))

    run()
    with waiting_is_an_error():
        run()


def test_auto_takes_triton(monkeypatch):
    from ikbo_tree.kernels.reduce import triton_kernel

    calls = []
    forward = triton_kernel.forward
    monkeypatch.setattr(triton_kernel, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    tree = tree_of([3, 2], capacity=False).to("cuda")
    reduce(torch.ones(5, 2, device="cuda"), tree=tree, level="item", to="user")
    assert calls


def test_row_counts_compile_nothing():
    compiled = []
    before = knobs.runtime.jit_cache_hook
    try:
        for seed in range(12):
            # Sizes 1, 16 and between: the values that Triton would specialise a kernel for.
            counts = [[1], [16], [5, 3], [4] * 16, [0], [1500, 1548], [7] * 33][seed % 7]
            tree = tree_of(counts, capacity=False).to("cuda")
            item = torch.randn(sum(counts), 48, device="cuda", requires_grad=True)
            user = torch.randn(len(counts), 48, device="cuda", requires_grad=True)
            for op in REDUCTIONS:
                y = reduce(item, tree=tree, level="item", to="user", op=op)
                torch.autograd.grad(y, item, torch.ones_like(y))
            y = segment_softmax(item, tree=tree, level="item", of="user")
            torch.autograd.grad(y, item, torch.ones_like(y))
            y = broadcast(user, tree=tree, level="user", to="item")
            torch.autograd.grad(y, user, torch.ones_like(y))
            if seed == 0:  # the smallest batch compiles what the largest one needs
                knobs.runtime.jit_cache_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    finally:
        knobs.runtime.jit_cache_hook = before
    assert compiled == []


def test_one_user_with_100000_items():
    counts = [1] * 500 + [100_000] + [1] * 500
    tree = tree_of(counts, capacity=False).to("cuda")
    x = torch.randn(sum(counts), 64, device="cuda")
    for op in REDUCTIONS:
        y = reduce(x, tree=tree, level="item", to="user", op=op, impl="triton")
        part = x[500:100_500].double()
        want = getattr(part, f"a{op}" if op in ("max", "min") else op)(0)
        torch.testing.assert_close(y[500].double(), want, rtol=1e-5, atol=2e-3)
        assert torch.equal(y[:500], x[:500])
        assert torch.equal(y[501:], x[100_500:])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    tree = tree_of([3, 0, 2], capacity=False).to("cuda:1")
    x = torch.randn(5, 8, device="cuda:1", requires_grad=True)
    assert torch.cuda.current_device() == 0
    y = reduce(x, tree=tree, level="item", to="user", impl="triton")
    torch.autograd.grad(y.sum(), x)
    assert torch.equal(y[0].cpu(), x.detach()[:3].cpu().sum(0))
    assert torch.cuda.current_device() == 0


def test_offsets_past_two_to_the_31():
    """Rows 2^31 elements apart, in memory that is one large buffer of bytes."""
    stride = 2**31 + 64
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * stride:
        pytest.skip("needs 12 GiB")
    buffer = torch.empty(2 * stride + 64, dtype=torch.uint8, device="cuda")
    far = buffer.as_strided((3, 64), (stride, 1))
    far.copy_(torch.arange(3 * 64, device="cuda").view(3, 64) % 251)
    tree = tree_of([2, 0, 1], capacity=False).to("cuda")
    y = broadcast(far, tree=tree, level="user", to="item", impl="triton")
    assert torch.equal(y, far[[0, 0, 2]])
    del buffer, far
    wide = torch.empty(2 * stride + 64, dtype=torch.float16, device="cuda")
    rows = wide.as_strided((3, 64), (stride, 1)).normal_()
    for op in ("sum", "logsumexp"):
        y = reduce(rows, tree=tree, level="item", to="user", op=op, impl="triton")
        want = reduce(rows.contiguous(), tree=tree, level="item", to="user", op=op, impl="triton")
        assert torch.equal(y, want)
