"""What the attention kernels compile to on GPUs that this machine does not have."""

from dataclasses import dataclass

import pytest
import torch
from offline.compiling import compile_only, read
from triton.runtime.jit import JITFunction

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.self_target_attention import triton_kernel as both
from ikbo_tree.kernels.target_attention import triton_backward
from ikbo_tree.kernels.target_attention import triton_kernel as target
from ikbo_tree.kernels.target_attention.memories import Memory

# Sizes 1, 16 and between are what Triton would specialise a kernel for; the last one has segments
# of several pieces.
BATCHES = [
    ([1], [1]),
    ([16], [1] * 16),
    ([2, 1], [5, 3, 0]),
    ([1] * 16, [4] * 16),
    ([0, 2], [0, 0]),
    ([1, 1], [1300, 700]),
]


@dataclass
class Shape:
    """Sizes of a call that have nothing to do with row counts."""

    n: int = 64
    D: int = 128
    DV: int = 128
    dtype: torch.dtype = torch.float16
    heads: int = 2


def use(counts, shape, *, levels=("user",), backward=True, own=False):
    """Every launch of an op, forward and backward."""
    tree = BroadcastTree.from_counts({"vendor": counts[0], "item": counts[1]}, root="user")

    def zeros(*size):
        return torch.zeros(size, dtype=shape.dtype)

    q = zeros(tree.rows("item"), shape.n, shape.heads, shape.D)
    memories = []
    for level in levels:
        route = tree.route("item", level)
        size = (tree.rows(level), 96, shape.heads)
        memories.append(
            Memory(
                zeros(*size, shape.D),
                zeros(*size, shape.DV),
                index=route.index,
                offsets=route.offsets,
                extent=torch.zeros(size[0], dtype=torch.int32),
            )
        )
    if own:
        q_self = zeros(*memories[0].k.shape)
        made = both.forward(q_self, q, memories[0], None, None, True, 0.1)
        if backward:
            grads = (*(x.new_ones(()).expand(x.shape) for x in made[:2]), None, None)
            both.backward(grads, made, q_self, q, memories[0], None, None, True, 0.1, [True] * 4)
        return
    o, lse = target.forward(q, memories, None, 0.1)
    if backward:
        needs = [True] * (1 + 2 * len(levels))
        grad = o.new_ones(()).expand(o.shape)
        target.backward(grad, None, o, lse, q, memories, None, 0.1, needs)


@pytest.mark.parametrize(
    ("n", "levels", "own"),
    [(1, ("user",), False), (16, ("user", "vendor"), False), (16, ("user",), True)],
)
def test_row_counts_compile_nothing(monkeypatch, n, levels, own):
    monkeypatch.setattr(triton_backward, "architecture", lambda device: "sm_90")
    shape = Shape(n=n, D=32, DV=32)
    with compile_only() as compiled:
        use(BATCHES[0], shape, levels=levels, own=own)
        assert compiled
        first = len(compiled)
        for counts in BATCHES[1:]:
            use(counts, shape, levels=levels, own=own)
        assert compiled[first:] == []


def built_for(monkeypatch, target_name, shape, **options):
    """What each kernel of a call takes, by its name."""
    monkeypatch.setattr(triton_backward, "architecture", lambda device: target_name)
    kept = {}
    with compile_only(target_name):
        compile_ = JITFunction.run

        def keep(self, *args, **kwargs):
            kept[self.__name__] = compile_(self, *args, **kwargs)
            return kept[self.__name__]

        monkeypatch.setattr(JITFunction, "run", keep)
        use(BATCHES[3], shape, **options)
        monkeypatch.setattr(JITFunction, "run", compile_)
    return {name: read(kernel, target_name) for name, kernel in kept.items()}


@pytest.mark.parametrize(
    ("target_name", "shape"),
    [
        ("sm_80", Shape()),
        ("sm_80", Shape(n=1)),
        ("sm_100", Shape()),
        ("gfx942", Shape()),
        ("gfx942", Shape(n=1)),
    ],
    ids=str,
)
def test_compiles_elsewhere(monkeypatch, target_name, shape):
    found = built_for(monkeypatch, target_name, shape)
    assert "key_gradients" in found
    for name, kernel in found.items():
        assert kernel.fits, f"{name} takes {kernel.shared} bytes of shared memory"
