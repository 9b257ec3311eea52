"""Small trees for tests of compositions, and functions compiled once for all of them."""

import numpy as np
import torch

from ikbo_tree import BroadcastTree
from ikbo_tree.testing.poison import natural_memory


def users(counts, **options):
    return BroadcastTree.from_counts({"item": counts}, root="user", **options)


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
