"""Ops that are compositions of tree ops, held to the contracts with flat torch as reference."""

import numpy as np
import torch

from ikbo_tree import BroadcastTree
from ikbo_tree.testing.checks import CHECKS, Bench
from ikbo_tree.testing.poison import natural_memory


def users(counts, **options):
    return BroadcastTree.from_counts({"item": counts}, root="user", **options)


def flat(tree, level, x, of):
    """Live rows of `level`: what a flat model has of `x` there."""
    return x[tree.ancestors(level, of=of)[: tree.rows(level)].long()]


def side_by_side(tree, level, x, names):
    """Live rows of `level`: what a flat model concatenates there."""
    return torch.cat([flat(tree, level, x[n], n) for n in names], dim=1)


def padded(tree, level, x):
    return torch.cat([x, x.new_zeros(tree.capacity(level) - len(x), *x.shape[1:])])


def hold(call, tree, seed, dtype=torch.float32, impl="torch", without=()):
    """Every check but "reference", which in these calls is flat torch itself, and `without`."""
    bench = Bench(call, tree, impl, dtype, seed, torch.device("cpu"))
    for name, check in CHECKS.items():
        if name != "reference" and name not in without:
            check(bench)


def some_users(rng, spare, counts=(1, 40), rows=(2, 9)):
    """A tree of random counts, with so many spare rows a level if there are any."""
    drawn = rng.integers(*counts, int(rng.integers(*rows)))
    capacity = {"user": len(drawn) + spare, "item": int(drawn.sum()) + spare}
    return users(drawn, capacity=capacity if spare else None)


def compiled_once(score, tries=7):
    """Gives `score` compiled, and a source of trees, to each of `tries`.

    Fails at the end unless all after the third ran what had been compiled by then.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(score, fullgraph=True, backend=counter)
    rng = np.random.default_rng(0)
    with natural_memory():
        for count in range(tries):
            yield compiled, rng
            if count == 2:
                settled = counter.frame_count
    assert counter.frame_count == settled
