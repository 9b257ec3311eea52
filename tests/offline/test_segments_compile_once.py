"""Row counts compile nothing: the first batch compiles all that any later one needs."""

import pytest
import torch
from offline.compiling import compile_only

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.broadcast import triton_kernel as broadcast
from ikbo_tree.kernels.reduce import triton_kernel as reduce
from ikbo_tree.kernels.segment_softmax import triton_kernel as softmax

# Sizes 1, 16 and between are what Triton would specialise a kernel for; the last has segments of
# several pieces.
BATCHES = [[1], [16], [5, 3], [4] * 16, [1500, 1548], [7] * 33]


def use(op, counts):
    """Every launch of an op, forward and backward."""
    tree = BroadcastTree.from_counts({"item": counts}, root="user")
    route = tree.route("item", "user")
    x, y = torch.zeros(sum(counts), 48), torch.zeros(len(counts), 48)
    if op == "broadcast":
        broadcast.forward(y, route)
    elif op == "softmax":
        softmax.forward(x, route)
        softmax.backward(x, x, route)
    else:
        reduce.forward(x, route, op)
        if op not in ("sum", "mean"):
            reduce.backward(y, x, y, route, op)


@pytest.mark.parametrize("op", ["broadcast", "sum", "max", "logsumexp", "softmax"])
def test_row_counts_compile_nothing(op):
    with compile_only() as compiled:
        use(op, BATCHES[0])
        assert compiled
        first = len(compiled)
        for counts in BATCHES[1:]:
            use(op, counts)
        assert compiled[first:] == []
