"""10,000 random trees: nothing grows and, after a while, nothing is compiled."""

import resource

import numpy as np
import pytest
import torch

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common import triton_launch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TREES, SETTLED = 10_000, 1_000


def draw_tree(rng):
    vendors = rng.integers(0, 4, rng.integers(0, 5))
    items = rng.integers(0, 12, vendors.sum())
    return BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user").to("cuda")


def make(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16).requires_grad_()


def linear_compression(tree):
    e = {n: make(tree.rows(n), k, 64) for n, k in (("user", 24), ("vendor", 16), ("item", 40))}
    w = {n: make(48, x.shape[1]) for n, x in e.items()}
    return ikbo.linear_compression(e, w, tree=tree, impl="triton"), [*e.values(), *w.values()]


def target_attention(tree):
    q = make(tree.rows("item"), 3, 2, 64)
    memories = {
        n: (make(tree.rows(n), 40, 2, 64), make(tree.rows(n), 40, 2, 64))
        for n in ("user", "vendor")
    }
    o = ikbo.target_attention(q, memories, tree=tree, level="item", impl="triton")
    return o, [q, *(x for pair in memories.values() for x in pair)]


def reduce(tree):
    x = make(tree.rows("item"), 33)
    return ikbo.reduce(x, tree=tree, level="item", to="user", op="logsumexp", impl="triton"), [x]


OPS = (linear_compression, target_attention, reduce)


def test_nothing_grows():
    rng = np.random.default_rng(0)
    held, resident, compiled = [], [], []
    for i in range(TREES):
        out, inputs = OPS[i % len(OPS)](draw_tree(rng))
        torch.autograd.grad(out.sum(), inputs)
        del out, inputs
        if i + 1 in (SETTLED, TREES):
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            compiled.append(len(triton_launch._COMPILED))
    assert held[1] <= held[0]
    assert compiled[1] == compiled[0]
    assert resident[1] - resident[0] < 50_000  # kB; a leak of 6 kB a tree would show
