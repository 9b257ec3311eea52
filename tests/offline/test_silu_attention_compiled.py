"""What the kernels of silu_attention compile to on GPUs that this machine does not have."""

import pytest
import torch
from offline.compiling import TARGETS, compile_only, read
from triton.runtime.jit import JITFunction

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.silu_attention import triton_kernel
from ikbo_tree.kernels.silu_attention.op import Factors
from ikbo_tree.kernels.target_attention.memories import Memory

# Sizes 1, 16 and between are what Triton would specialise a kernel for.
BATCHES = [[1], [16], [5, 3, 0], [4] * 16, [0, 0], [1300, 700]]


def use(counts, D=64, dtype=torch.float16, heads=2):
    """Every launch of the op, forward and backward, for histories of two kinds."""
    tree = BroadcastTree.from_counts({"item": counts}, root="user")
    route, users = tree.route("item", "user"), tree.rows("user")
    q = torch.zeros(tree.rows("item"), 1, heads, D, dtype=dtype)
    padded = torch.zeros(users, 96, heads, D, dtype=dtype)
    packed = torch.zeros(users * 96, heads, D, dtype=dtype)
    lengths = torch.zeros(users, dtype=torch.int32)
    offsets = torch.zeros(users + 1, dtype=torch.int32)
    way = {"index": route.index, "offsets": route.offsets}
    memories = [
        Memory(padded, padded, extent=lengths, **way),
        Memory(packed, packed, bias=torch.zeros(users * 96, heads), extent=offsets, **way),
    ]
    factors = Factors(torch.ones(tree.rows("item")), 1.0)
    o = triton_kernel.forward(q, memories, None, factors, 0.1)
    triton_kernel.backward(o, q, memories, None, factors, 0.1, [True] * 6)


def test_row_counts_compile_nothing(monkeypatch):
    monkeypatch.setattr(triton_kernel, "architecture", lambda device: "sm_90")
    with compile_only() as compiled:
        use(BATCHES[0])
        first = list(compiled)
        # Without items there is no launch, but nothing more either.
        for counts in BATCHES[1:]:
            use(counts)
        assert len(first) == 6  # forward, first and last; the queries' likewise; two of keys
        assert compiled == first


@pytest.mark.parametrize(("D", "dtype"), [(64, "float16"), (128, "bfloat16"), (64, "float32")])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_compiles(monkeypatch, target, D, dtype):
    kept = []
    monkeypatch.setattr(triton_kernel, "architecture", lambda device: target)
    with compile_only(target):
        run = JITFunction.run

        def keep(self, *args, **kwargs):
            kept.append(run(self, *args, **kwargs))
            return kept[-1]

        monkeypatch.setattr(JITFunction, "run", keep)
        use([5, 3, 0], D=D, dtype=getattr(torch, dtype))
    assert len(kept) == 6
    for built in kept:
        found = read(built, target)
        assert found.fits
        if target == "sm_90":
            assert found.spills == 0
            assert dtype == "float32" or found.hgmma > 0
