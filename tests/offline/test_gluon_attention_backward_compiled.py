"""What the Hopper gradient kernels of attention compile to, without such a GPU."""

import re
import subprocess
from dataclasses import dataclass

import pytest
import torch
from offline.compiling import SHARED_LIMIT, compile_only, read
from offline.miscompiled import miscompiled
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.gemm_forms import power_of_two
from ikbo_tree.kernels.target_attention import gluon_backward
from ikbo_tree.kernels.target_attention.gluon_backward_config import KEYS, QUERIES
from ikbo_tree.kernels.target_attention.memories import Memory

# Sizes 1, 16 and between are what Triton would specialise a kernel for; the last has pieces.
BATCHES = [
    ([1], [1]),
    ([16], [1] * 16),
    ([2, 1], [5, 3, 0]),
    ([1] * 16, [4] * 16),
    ([0, 2], [0, 1]),
    ([1, 1], [1300, 700]),
]


@dataclass(frozen=True)
class Shape:
    """A call but for its row counts."""

    D: int = 128
    n: int = 64
    dtype: torch.dtype = torch.float16
    heads: int = 2
    key_heads: int = 2
    levels: tuple[str, ...] = ("user",)
    packed: bool = False
    dlse: bool = False


def use(counts, shape):
    """The backward of a call, on the CPU."""
    tree = BroadcastTree.from_counts({"vendor": counts[0], "item": counts[1]}, root="user")

    def zeros(*size):
        return torch.zeros(size, dtype=shape.dtype)

    memories = []
    for level in shape.levels:
        route = tree.route("item", level)
        rows = tree.rows(level)
        size = (7 * rows,) if shape.packed else (rows, 96)
        k, v = (zeros(*size, shape.key_heads, shape.D) for _ in range(2))
        memories.append(
            Memory(
                k,
                v,
                extent=torch.zeros(rows + shape.packed, dtype=torch.int32),
                index=None if route is None else route.index,
                offsets=None if route is None else route.offsets,
            )
        )
    q, o, do = (zeros(tree.rows("item"), shape.n, shape.heads, shape.D) for _ in range(3))
    lse = torch.zeros(q.shape[:-1])
    dlse = lse.clone() if shape.dlse else None
    needs = [True] * (1 + 2 * len(memories))
    gluon_backward.backward(do, dlse, o, lse, q, memories, None, 0.1, needs)


def built(monkeypatch, shape):
    """The Gluon kernels that a call compiles: queries, queries again, keys."""
    kept = []
    with compile_only():
        compile_ = JITFunction.run

        def keep(self, *args, **kwargs):
            kernel = compile_(self, *args, **kwargs)
            if isinstance(self, GluonJITFunction):
                kept.append(kernel)
            return kernel

        monkeypatch.setattr(JITFunction, "run", keep)
        use(BATCHES[3], shape)
        monkeypatch.setattr(JITFunction, "run", compile_)
    assert len(kept) == 2 + len(shape.levels)
    return kept[:3]


def complaints(kernel, folder):
    """What the assembler warns of: matrix instructions that it had to serialise, for one."""
    path = folder / "kernel.ptx"
    path.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path) + ".o"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line for line in said.splitlines() if re.search(r"warning|C7\d\d\d", line)]


SHAPES = [
    *(Shape(D=D) for D in KEYS),
    Shape(dtype=torch.bfloat16, key_heads=1, dlse=True),
    Shape(packed=True),
    Shape(D=64, packed=True, key_heads=1),
    Shape(levels=("user", "vendor")),
    Shape(levels=("user", "vendor", "item", "vendor"), packed=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_they_take(monkeypatch, tmp_path, shape):
    width = power_of_two(shape.D)
    for i, kernel in enumerate(built(monkeypatch, shape)):
        found = read(kernel, "sm_90")
        assert found.shared <= SHARED_LIMIT["sm_90"]
        # With four memories a word that the scheduler reads once a work has no register.
        assert found.spills <= (8 if len(shape.levels) > 1 and i == 0 else 0)
        assert complaints(kernel, tmp_path) == []
        # Two consumers: S and dP, and dV and dK over 64 query rows, or dQ over a block of keys.
        sums = 2 * 64 if i == 2 else QUERIES[shape.D].keys
        assert found.hgmma == 2 * (2 * width + sums) // 16
        assert miscompiled(found.listing) == []
        # Without these every role would have as many registers, and the consumers would spill.
        wide = (KEYS if i == 2 else QUERIES)[shape.D].consumer_registers
        assert f"0x{wide:x}" in " ".join(re.findall(r"USETMAXREG.*", found.listing))


# With heads as nobody else here has them, so that the first batch compiles.
FRESH = [
    Shape(D=64, heads=3, key_heads=1),
    Shape(D=64, heads=3, key_heads=1, levels=("user", "vendor"), packed=True),
]


@pytest.mark.parametrize("shape", FRESH, ids=str)
def test_row_counts_compile_nothing(shape):
    with compile_only() as compiled:
        use(BATCHES[0], shape)
        first = len(compiled)
        # Queries, queries again, keys; what adds pieces is the same for others here.
        assert first >= 3
        for counts in BATCHES[1:]:
            use(counts, shape)
        assert len(compiled) == first


def test_what_is_left_to_the_triton_path(monkeypatch):
    """Either part, by sizes of rows alone."""
    ran = []
    for name in ("query_gradients", "key_gradients"):
        monkeypatch.setattr(gluon_backward, name, name)
    monkeypatch.setattr(
        gluon_backward, "launch", lambda kernel, *args, **options: ran.append(kernel)
    )
    theirs = gluon_backward.triton_backward
    monkeypatch.setattr(theirs, "launch", lambda kernel, *args, **options: ran.append("triton"))
    with compile_only():
        for shape in (Shape(D=192), Shape(n=15)):
            use(BATCHES[2], shape)
            assert ran == ["triton", "triton"]
            ran.clear()
        use(BATCHES[2], Shape())
    assert ran[:3] == ["query_gradients"] * 2 + ["key_gradients"]
    assert "triton" not in ran
