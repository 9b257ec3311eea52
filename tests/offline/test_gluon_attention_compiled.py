"""What the Hopper attention kernel compiles to, and what it refuses, without such a GPU."""

import re
import subprocess
from dataclasses import dataclass, replace

import pytest
import torch
from offline.compiling import SHARED_LIMIT, compile_only, read
from offline.miscompiled import miscompiled
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.self_target_attention import gluon_sm90 as both_sm90
from ikbo_tree.kernels.target_attention import gluon_sm90
from ikbo_tree.kernels.target_attention.gluon_config import HOPPER
from ikbo_tree.kernels.target_attention.memories import Memory

# Sizes 1, 16 and between are what Triton would specialise a kernel for.
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
    scale: float = 0.1


def arguments(counts, shape):
    """Queries and memories on the CPU."""
    tree = BroadcastTree.from_counts({"vendor": counts[0], "item": counts[1]}, root="user")

    def zeros(*size):
        return torch.zeros(size, dtype=shape.dtype)

    memories = []
    for level in shape.levels:
        route = tree.route("item", level)
        rows = tree.rows(level)
        size = (7 * rows,) if shape.packed else (rows, 96)
        memories.append(
            Memory(
                zeros(*size, shape.key_heads, shape.D),
                zeros(*size, shape.key_heads, shape.D),
                extent=torch.zeros(rows + shape.packed, dtype=torch.int32),
                index=None if route is None else route.index,
                offsets=None if route is None else route.offsets,
            )
        )
    return zeros(tree.rows("item"), shape.n, shape.heads, shape.D), memories


def use(counts, shape):
    gluon_sm90.forward(*arguments(counts, shape), None, shape.scale)


def use_both(counts, shape, causal=False):
    """With a query for each key."""
    q, (memory,) = arguments(counts, shape)
    q_self = q.new_zeros(*memory.k.shape[:-2], *q.shape[2:])
    both_sm90.forward(q_self, q, memory, None, None, causal, shape.scale)


def built(monkeypatch, shape, use=use):
    """The kernels that a call compiles."""
    kept = []
    with compile_only() as compiled:
        compile_ = JITFunction.run

        def keep(self, *args, **kwargs):
            kept.append(compile_(self, *args, **kwargs))
            return kept[-1]

        monkeypatch.setattr(JITFunction, "run", keep)
        use(BATCHES[3], shape)
        monkeypatch.setattr(JITFunction, "run", compile_)
    assert len(compiled) <= len(kept)
    return kept


def complaints(kernel, folder):
    """What the assembler warns of: matrix instructions that it had to serialise, for one."""
    path = folder / "kernel.ptx"
    path.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path) + ".o"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [line for line in said.splitlines() if re.search(r"warning|C7\d\d\d", line)]


SHAPES = [
    *(Shape(D=D) for D in HOPPER),
    Shape(dtype=torch.bfloat16, key_heads=1, scale=-0.1),
    Shape(packed=True),
    Shape(levels=("user", "vendor")),
    Shape(levels=("user", "vendor", "item", "vendor"), packed=True),
    Shape(D=64, levels=("user", "vendor")),
    Shape(D=256, levels=("user", "vendor")),
]


def check(kernel, shape, folder, spills=0):
    """The kernel fits, and nothing of its loops is in memory."""
    found = read(kernel, "sm_90")
    assert miscompiled(found.listing) == []
    assert found.shared <= SHARED_LIMIT["sm_90"]
    assert found.spills <= spills
    assert complaints(kernel, folder) == []
    loops = re.findall(r"HGMMA(?:(?!BRA).)*HGMMA", found.listing, re.DOTALL)
    assert loops
    assert not any(re.search(r"\b(LDL|STL)\b", loop) for loop in loops)
    # Scores before the works and behind each, and in a step scores and values.
    assert found.hgmma >= 2 * 5 * 4
    # Without these every role would have as many registers, and the consumers would spill.
    wide = 8 * (HOPPER[shape.D].consumer_registers // 8)
    assert f"0x{wide:x}" in " ".join(re.findall(r"USETMAXREG.*", found.listing))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_it_takes(monkeypatch, tmp_path, shape):
    (kernel,) = built(monkeypatch, shape)
    check(kernel, shape, tmp_path)


# Bytes that the scheduler keeps in memory, which has the fewest registers at these widths, and the
# addresses of results.
SPILLS = {192: 128, 256: 128}

FEW = [
    Shape(n=1),
    Shape(n=5, packed=True, key_heads=1),
    Shape(n=15, D=64, levels=("user", "user")),
    Shape(n=1, D=256),
]


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_query_rows_a_row(monkeypatch, tmp_path, shape):
    chunks, tiles = built(monkeypatch, shape)
    check(tiles, shape, tmp_path, SPILLS.get(shape.D, 0))
    assert read(chunks, "sm_90").spills == 0


BOTH = [
    *((Shape(D=D), True) for D in HOPPER),
    (Shape(), False),
    (Shape(D=256), False),
    (Shape(n=1, packed=True, key_heads=1, dtype=torch.bfloat16), True),
]


@pytest.mark.parametrize(("shape", "causal"), BOTH, ids=str)
def test_histories_beside_target_rows(monkeypatch, tmp_path, shape, causal):
    kernels = built(monkeypatch, shape, lambda *call: use_both(*call, causal))
    (kernel,) = kernels
    check(kernel, shape, tmp_path, SPILLS.get(shape.D, 0))


# With heads as nobody else here has them, so that the first batch compiles.
FRESH = [
    Shape(D=64, heads=3, key_heads=1),
    Shape(D=64, heads=3, key_heads=1, levels=("user", "vendor")),
]


@pytest.mark.parametrize("shape", FRESH, ids=str)
def test_row_counts_compile_nothing(shape):
    with compile_only() as compiled:
        use(BATCHES[0], shape)
        assert len(compiled) == 1
        for counts in BATCHES[1:]:
            use(counts, shape)
        assert len(compiled) == 1


def test_row_counts_compile_nothing_for_few_query_rows():
    """The first batch has no long segment, and yet compiles the kernel that takes them."""
    shape = Shape(n=3, D=64, heads=3, key_heads=1)
    with compile_only() as compiled:
        for counts in BATCHES:
            use(counts, shape)
            assert sum("attention_forward" in name for name in compiled) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_row_counts_compile_nothing_for_histories(packed):
    shape = Shape(D=64, heads=3, key_heads=1, packed=packed)
    with compile_only() as compiled:
        for counts in BATCHES:
            use_both(counts, shape)
            assert len(compiled) == 1


def reason(monkeypatch, shape=None, device="cuda", live=None, **changes):
    monkeypatch.setattr(gluon_sm90, "architecture", lambda device: "sm_90")
    q, memories = arguments(BATCHES[2], shape or Shape())
    memories = [replace(memories[0], **changes), *memories[1:]]
    return gluon_sm90.unsupported(torch.device(device), q, memories, live, 0.1)


def test_what_it_refuses(monkeypatch):
    """Each reason, and none for what it takes."""
    assert reason(monkeypatch) is None
    assert reason(monkeypatch, Shape(levels=("user", "vendor", "item"))) is None
    assert "compute capability 9.0" in reason(monkeypatch, device="cpu")
    assert "float32" in reason(monkeypatch, Shape(dtype=torch.float32))
    assert "got 80 and 80" in reason(monkeypatch, Shape(D=80))
    assert reason(monkeypatch, Shape(n=15, levels=("user", "user"))) is None
    assert "one level" in reason(monkeypatch, Shape(n=15, levels=("user", "vendor")))
    assert "one level" in reason(monkeypatch, Shape(n=1, levels=("item",)))
    assert "up to 4 memories" in reason(monkeypatch, Shape(levels=("user",) * 5))
    assert "no bias" in reason(monkeypatch, bias=torch.zeros(1, 96))
    assert "no mask" in reason(monkeypatch, mask=torch.ones(1, 96, dtype=torch.bool))
    assert "unsorted" in reason(monkeypatch, order=torch.zeros(8, dtype=torch.int32))
