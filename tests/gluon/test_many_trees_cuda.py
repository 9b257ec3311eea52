"""1,000 random trees of every kind, and a minute of them: right, and the same bits twice."""

import itertools
import time

import numpy as np
import pytest
import torch

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.testing.poison import poisoned_memory

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

TREES = 1_000
SECONDS = 60
COMPILED = 30
"""Trees after which nearly all is compiled, and the minute begins."""
NAMES = ("user", "vendor", "shop", "item")
# W's rows are no multiple of 16 bytes at one level, and tiles of M and N have tails.
WIDTHS = {"user": 72, "vendor": 20, "shop": 33, "item": 64}
M, N = 70, 136


def draw_tree(rng, turn):
    """Of every 30 trees 10 have over 500 rows, 10 others three levels or more, 3 empty levels."""
    kind = turn % 30
    depth = int(rng.integers(3, 5)) if 10 <= kind < 20 else int(rng.integers(2, 4))
    levels = (*NAMES[: depth - 1], "item")
    most = 40 if kind < 10 else 6
    rows = int(rng.integers(1, 30))
    counts = {}
    for name in levels[1:]:
        if 20 <= kind < 23:
            below = np.zeros(rows, dtype=np.int64)
        else:
            below = rng.integers(0, most + 1, rows)
        if kind < 10 and name == levels[-1]:
            below[rng.integers(rows)] += 501
        counts[name] = below
        rows = int(below.sum())
        most = min(most, 6)
        if rows == 0:
            counts |= {other: [] for other in levels[1:] if other not in counts}
            break
    return BroadcastTree.from_counts(counts, root="user").to("cuda")


def draw(*shape):
    return torch.randn(shape, device="cuda").half().requires_grad_()


def twice(call, inputs):
    """Result and gradients, which two calls give bit by bit."""
    found = []
    for _ in range(2):
        with poisoned_memory():
            out = call()
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
        found.append([out.detach(), *grads])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.view(torch.int16), b.view(torch.int16))
    return found[0]


def test_the_quotas():
    """What `draw_tree` promises of its thirds and tenths."""
    rng = np.random.default_rng(0)
    trees = [draw_tree(rng, i) for i in range(300)]
    rows = [tree.rows("item") for tree in trees]
    assert sum(n > 500 for n in rows) >= 100
    assert sum(len(tree.levels) >= 3 for tree in trees) >= 100
    assert sum(n == 0 for n in rows) >= 30


def test_linear_compression_of_many_trees():
    """Each element within a rounding of the float64 sum and two 2^-17 of its terms."""
    rng = np.random.default_rng(1)
    w = {name: draw(M, k) for name, k in WIDTHS.items()}
    for turn in range(TREES):
        tree = draw_tree(rng, turn)
        e = {name: draw(tree.rows(name), WIDTHS[name], N) for name in tree.levels}
        mine = {name: w[name] for name in tree.levels}
        call = lambda e=e, mine=mine, tree=tree: ikbo.linear_compression(  # noqa: E731
            e, mine, tree=tree, impl="gluon"
        )
        out, *_ = twice(call, [*e.values(), *mine.values()])
        exact, terms = 0.0, 0.0
        for name in tree.levels:
            rows = slice(None) if name == "item" else tree.ancestors("item", of=name).long()
            at, left = e[name].detach().double()[rows], mine[name].detach().double()
            exact, terms = exact + left @ at, terms + left.abs() @ at.abs()
        error = (out.double() - exact).abs()
        assert (error <= 2**-11 * exact.abs() + 2**-16 * terms).all(), (turn, tree)


def attention(rng, tree):
    """A call over one or two levels above, with any number of query rows an item."""
    n, D = int(rng.choice([1, 5, 16, 33, 64])), 128
    above = tree.levels[-3:-1] if n >= 16 else tree.levels[-2:-1]
    keys = int(rng.integers(1, 300))
    memories = {
        name: (draw(tree.rows(name), keys, 2, D), draw(tree.rows(name), keys, 2, D))
        for name in above
    }
    q = draw(tree.rows("item"), n, 2, D)
    inputs = [q, *(x for pair in memories.values() for x in pair)]
    return lambda impl: ikbo.target_attention(
        q, memories, tree=tree, level="item", impl=impl
    ), inputs


def test_a_minute_of_attention():
    """Gradients too; the other GPU path says the same to a few roundings of the largest value."""
    rng = np.random.default_rng(2)
    end = None
    for turn in itertools.count():
        if turn == COMPILED:
            end = time.monotonic() + SECONDS
        if end is not None and time.monotonic() > end:
            break
        call, inputs = attention(rng, draw_tree(rng, turn))
        found = twice(lambda call=call: call("gluon"), inputs)
        out = call("triton")
        others = [out, *torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)]
        for a, b in zip(found, others, strict=True):
            if a is not None and a.numel():
                scale = max(1.0, float(b.abs().max()))
                assert float((a.float() - b.float()).abs().max()) <= 2**-7 * scale, turn
    assert turn > 10 * COMPILED
