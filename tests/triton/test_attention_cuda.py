"""What only a GPU can show of the attention kernels: graphs, waiting, compiling, long segments."""

import contextlib

import pytest
import torch
from triton import knobs

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.routes import Route

pytestmark = pytest.mark.gpu

USERS, VENDORS, ITEMS, KEYS = 8, 30, 200, 300
SHRINKING = [
    ([4, 0, 3, 1], [30, 2, 0, 5, 80, 1, 1, 9]),
    ([1], [200]),
    ([1, 1], [0, 0]),
    ([0, 0], []),
    ([], []),
]
"""Vendors a user and items a vendor of smaller and smaller trees; the last has no row at all."""


def tree_of(vendors, items, *, capacity=True):
    spare = {"user": USERS, "vendor": VENDORS, "item": ITEMS} if capacity else None
    counts = {"vendor": vendors, "item": items}
    return BroadcastTree.from_counts(counts, root="user", capacity=spare)


class Step:
    """A forward and backward of both ops on tensors of fixed places."""

    def __init__(self, n, dtype=torch.float16):
        def make(*shape):
            return torch.zeros(*shape, device="cuda", dtype=dtype).requires_grad_()

        self.q = make(ITEMS, n, 2, 64)
        self.own = make(USERS, KEYS, 2, 64)
        self.user = (make(USERS, KEYS, 2, 64), make(USERS, KEYS, 2, 64))
        self.vendor = (make(VENDORS, 20, 1, 64), make(VENDORS, 20, 1, 64))
        self.lengths = torch.zeros(USERS, dtype=torch.int32, device="cuda")
        self.do = torch.zeros(ITEMS, n, 2, 64, device="cuda", dtype=dtype)
        self.do_own = torch.zeros(USERS, KEYS, 2, 64, device="cuda", dtype=dtype)

    @property
    def leaves(self):
        return [self.q, self.own, *self.user, *self.vendor]

    def fill(self, tree):
        """New values; NaN in dead rows, which nobody may read."""
        rows = {name: tree.rows(name) for name in tree.levels}
        with torch.no_grad():
            for x in (*self.leaves, self.do, self.do_own):
                x.normal_()
            for x, level in (
                (self.q, "item"),
                (self.do, "item"),
                (self.own, "user"),
                *((x, "user") for x in self.user),
                *((x, "vendor") for x in self.vendor),
            ):
                x[rows[level] :] = torch.nan
            self.lengths.random_(0, KEYS + 1)

    def __call__(self, user, vendor, live, live_of):
        ops = torch.ops.ikbo_tree
        routes = ([user.index, vendor.index], [user.offsets, vendor.offsets], [None, None])
        o, lse = ops.target_attention(
            self.q,
            [self.user[0], self.vendor[0]],
            [self.user[1], self.vendor[1]],
            [],
            [],
            [self.lengths, None],
            [None, None],
            *routes,
            live,
            0.125,
            "triton",
        )
        o_self, o_target, _, _ = ops.self_target_attention(
            self.own,
            self.q,
            *self.user,
            self.lengths,
            user.index,
            user.offsets,
            None,
            live,
            live_of,
            True,
            0.125,
            "triton",
        )
        grads = torch.autograd.grad(
            [o, o_self, o_target], self.leaves, [self.do, self.do_own, self.do], allow_unused=True
        )
        return [o, lse, o_self, o_target, *grads]


def maps(tree):
    tree = tree.to("cuda")
    return (
        tree.route("item", "user"),
        tree.route("item", "vendor"),
        tree.live("item"),
        tree.live("user"),
    )


@pytest.mark.parametrize("n", [1, 32])
def test_a_graph_captured_at_capacity_serves_smaller_trees(n):
    full = maps(tree_of([4] * 7 + [2], [6] * 20 + [8] * 10))
    held = [
        Route(*(None if part is None else part.clone() for part in x))
        if isinstance(x, Route)
        else x.clone()
        for x in full
    ]
    step = Step(n)
    step(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*held)
    for vendors, items in SHRINKING:
        tree = tree_of(vendors, items)
        smaller = maps(tree)
        for mine, theirs in zip(held, smaller, strict=True):
            pairs = zip(mine, theirs, strict=True) if isinstance(mine, Route) else [(mine, theirs)]
            for a, b in pairs:
                if a is not None:
                    a.copy_(b)
        step.fill(tree)
        with torch.no_grad():
            for x in outputs:
                x.fill_(torch.nan)
        graph.replay()
        for got, want in zip(outputs, step(*smaller), strict=True):
            got, want = got.detach(), want.detach()
            integers = torch.int16 if got.element_size() == 2 else torch.int32
            assert torch.equal(got.contiguous().view(integers), want.contiguous().view(integers))
            assert not got.isnan().any()


@contextlib.contextmanager
def waiting_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def use(tree, n, dtype=torch.float16, impl="triton"):
    """Both ops through the public face, forward and backward."""
    tree = tree.to("cuda")

    def make(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()

    q = make(tree.capacity("item"), n, 2, 64)
    user = [make(tree.capacity("user"), 70, 2, 64) for _ in range(3)]
    vendor = [make(tree.capacity("vendor"), 20, 2, 64) for _ in range(2)]

    def run():
        o = ikbo.target_attention(
            q, {"user": user[:2], "vendor": vendor}, tree=tree, level="item", impl=impl
        )
        o_self, o_target = ikbo.self_target_attention(
            user[2], q, *user[:2], tree=tree, level="item", of="user", impl=impl
        )
        total = o.sum() + o_self.sum() + o_target.sum()
        torch.autograd.grad(total, [q, *user, *vendor])

    return run


@pytest.mark.parametrize("n", [1, 32])
def test_nothing_waits_for_the_device(n):
    run = use(tree_of([2, 0, 1], [5, 0, 9]), n)
    run()
    with waiting_is_an_error():
        run()


@pytest.mark.parametrize("n", [1, 32])
def test_row_counts_compile_nothing(n):
    compiled = []
    before = knobs.runtime.jit_cache_hook
    trees = [
        ([1], [1]),
        ([16], [1] * 16),
        ([2, 1], [5, 3, 0]),
        ([1] * 16, [4] * 16),
        ([0, 2], [0, 0]),
        ([1, 1], [900, 700]),
        ([3, 3, 3], [7] * 9),
    ]
    try:
        for i, (vendors, items) in enumerate(trees):
            use(tree_of(vendors, items, capacity=False), n)()
            if i == 0:  # the smallest batch compiles what the largest one needs
                knobs.runtime.jit_cache_hook = lambda **about: compiled.append(about["repr"])
    finally:
        knobs.runtime.jit_cache_hook = before
    assert compiled == []


def test_auto_takes_triton(monkeypatch):
    from ikbo_tree.kernels.target_attention import triton_kernel

    calls = []
    forward = triton_kernel.forward
    monkeypatch.setattr(triton_kernel, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    tree = BroadcastTree.from_counts({"item": [3, 2]}, root="user").to("cuda")
    k = torch.zeros(2, 4, 1, 16, device="cuda")
    ikbo.target_attention(k.new_zeros(5, 1, 1, 16), {"user": (k, k)}, tree=tree, level="item")
    assert calls


@pytest.mark.parametrize("impl", ["torch"])
def test_one_user_with_20000_items(impl):
    """Its query rows are cut into pieces; beside it are users with one item."""
    counts = [1] * 500 + [20_000] + [1] * 500
    tree = BroadcastTree.from_counts({"item": counts}, root="user").to("cuda")
    torch.manual_seed(0)
    q = torch.randn(tree.rows("item"), 2, 2, 64, device="cuda").requires_grad_()
    k, v = (torch.randn(1001, 100, 1, 64, device="cuda").requires_grad_() for _ in range(2))
    do = torch.randn_like(q)
    found = []
    for one in ("triton", impl):
        o = ikbo.target_attention(q, {"user": (k, v)}, tree=tree, level="item", impl=one)
        found.append([o, *torch.autograd.grad(o, (q, k, v), do)])
    for got, want in zip(*found, strict=True):
        error = (got - want).norm() / want.norm()
        assert error < 1e-5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user").to("cuda:1")
    k = torch.randn(3, 9, 1, 16, device="cuda:1").requires_grad_()
    q = torch.randn(5, 2, 1, 16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    o = ikbo.target_attention(q, {"user": (k, k)}, tree=tree, level="item", impl="triton")
    torch.autograd.grad(o.sum(), k)
    want = ikbo.target_attention(q, {"user": (k, k)}, tree=tree, level="item", impl="torch")
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    assert torch.cuda.current_device() == 0
