"""Row counts compile nothing: the first batch compiles all that any later one needs."""

import pytest
import torch
from offline.compiling import compile_only

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.linear import triton_kernel as linear
from ikbo_tree.kernels.linear_compression import triton_kernel as linear_compression

# Sizes 1, 16 and between are what Triton would specialise a kernel for.
BATCHES = [[1], [16], [5, 3], [4] * 16, [300, 148], [7] * 33]


def use(op, counts, K, N, dtype):
    """Forward and backward of two levels, and all gradients."""
    tree = BroadcastTree.from_counts({"item": counts}, root="user")
    route = tree.route("item", "user")
    stages = Stages([1], [route.index], [route.offsets], [route.order], [])
    rows = (len(counts), sum(counts))
    M = 40
    per_row = () if op is linear else (N,)
    height = N if op is linear else M
    x = [torch.zeros(n, k, *per_row, dtype=dtype) for n, k in zip(rows, K, strict=True)]
    weight = [torch.zeros(height, k, dtype=dtype) for k in K]
    bias = torch.zeros(N, dtype=dtype) if op is linear else None
    out = op.forward(x, weight, bias, stages, None)
    op.backward(out, x, weight, stages, [True] * 4 + [op is linear])


@pytest.mark.parametrize("op", [linear, linear_compression], ids=["linear", "linear_compression"])
@pytest.mark.parametrize(
    ("K", "N", "dtype"),
    [((24, 37), 40, torch.float16), ((16, 48), 17, torch.float32)],
    ids=["float16", "float32"],
)
def test_row_counts_compile_nothing(monkeypatch, op, K, N, dtype):
    monkeypatch.setattr(op, "architecture", lambda device: "sm_90")
    with compile_only() as compiled:
        use(op, BATCHES[0], K, N, dtype)
        assert compiled
        first = len(compiled)
        for counts in BATCHES[1:]:
            use(op, counts, K, N, dtype)
        assert compiled[first:] == []
