"""What the Hopper kernel of `linear` compiles to, read from its machine code."""

import re
import subprocess
from dataclasses import replace

import pytest
import torch
from offline.compiling import compile_only, read
from offline.miscompiled import miscompiled
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.linear import gluon_sm90
from ikbo_tree.kernels.linear.gluon_config import choose

HALF, BRAIN = torch.float16, torch.bfloat16


def forward(rows, K, N, dtype=HALF, partial_dtype=None, consumer=None, bias=True):
    """A call whose values nobody looks at: what is launched is compiled, and nothing runs."""
    x = [torch.zeros(n, k, dtype=dtype) for n, k in zip(rows, K, strict=True)]
    weight = [torch.zeros(N, k, dtype=dtype) for k in K]
    consumer = list(range(1, len(rows))) if consumer is None else consumer
    index = [torch.zeros(rows[c], dtype=torch.int32) for c in consumer]
    added = torch.zeros(N, dtype=dtype) if bias else None
    gluon_sm90.forward(x, weight, added, Stages(consumer, index, [], [], []), partial_dtype)


def compiled(monkeypatch, *args, **options):
    """The Hopper kernels that a call launches."""
    kept = []
    with compile_only():
        warm = JITFunction.run

        def run(self, *args, **kwargs):
            built = warm(self, *args, **kwargs)
            if self.__name__ == "stages_kernel":
                kept.append(built)
            return built

        monkeypatch.setattr(JITFunction, "run", run)
        forward(*args, **options)
        monkeypatch.setattr(JITFunction, "run", warm)
    assert kept
    return kept


def assembler_says(built, folder):
    ptx = folder / "kernel.ptx"
    ptx.write_text(built.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def check(kernels, folder, *, columns, partials=True, by_threads=False):
    """Products of the whole width by the tensor cores, all by the copy engine, nothing spilled."""
    for built in kernels:
        found = read(built, "sm_90")
        assert found.spills == 0
        assert found.fits
        assert set(re.findall(r"HGMMA\.64x(\d+)x16", found.listing)) == {columns}
        assert "UTMALDG.2D" in found.listing
        assert not re.search(r"\bC75\d\d\b", assembler_says(built, folder))
        assert not miscompiled(found.listing)
        registers = {int(n) for n in re.findall(r"\bR(\d+)\b", found.listing)}
        assert max(registers) < 248
        if partials:
            assert found.widest_load == found.widest_store == 128
    assert ("UTMASTG.2D" in found.listing) != by_threads


CASES = {
    "default": (((16, 500), (1024, 512), 512), {}, "256"),
    "rounded partials": (((16, 500), (1024, 512), 512), {"partial_dtype": HALF}, "256"),
    "bfloat16": (
        ((16, 128, 500), (1024, 512, 512), 1024),
        {"dtype": BRAIN, "partial_dtype": BRAIN},
        "256",
    ),
    "one level": (((500,), (512,), 512), {}, "256"),
    "one level, no bias": (((500,), (512,), 512), {"bias": False}, "256"),
    "four levels": (((2, 3, 5, 9), (64, 65, 20, 0), 256), {}, "256"),
    "three producers": (((2, 3, 4, 9), (64, 65, 20, 1), 512), {"consumer": [3, 3, 3]}, "256"),
    "two launches": (((2, 3, 4, 5, 6, 7), (100,) * 6, 512), {}, "256"),
    "128 columns": (((3, 5), (511, 20), 128), {}, "128"),
    "64 columns": (((3, 5), (511, 20), 8), {}, "64"),
    "odd columns": (((3, 5), (511, 20), 433), {}, "256"),
    "even columns": (((3, 5), (511, 20), 466), {"partial_dtype": HALF}, "256"),
    "one column": (((3, 5), (511, 20), 1), {}, "64"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name, marks=() if name in ("default", "rounded partials") else pytest.mark.slow
        )
        for name in CASES
    ],
)
def test_hopper(monkeypatch, tmp_path, case):
    args, options, columns = CASES[case]
    kernels = compiled(monkeypatch, *args, **options)
    check(
        kernels,
        tmp_path,
        columns=columns,
        partials=len(args[0]) > 1,
        by_threads=args[2] % 8 != 0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"ahead": False}, {"outstanding": 0}, {"keep": False}, {"branch": False}, {"behind": False}],
    ids=str,
)
@pytest.mark.parametrize("partial_dtype", [None, HALF], ids=str)
def test_variants(monkeypatch, tmp_path, change, partial_dtype):
    monkeypatch.setattr(gluon_sm90, "choose", lambda *args: replace(choose(*args), **change))
    args, _, columns = CASES["default"]
    check(compiled(monkeypatch, *args, partial_dtype=partial_dtype), tmp_path, columns=columns)


# Sizes 1, 16 and between are what Triton would specialise a kernel for.
BATCHES = [[1], [16], [5, 3], [4] * 16, [300, 148], [7] * 33, [0, 0, 2]]


@pytest.mark.parametrize("spare", [None, 5])
@pytest.mark.parametrize("N", [8, 9])
def test_row_counts_compile_nothing(spare, N):
    with compile_only() as seen:
        firsts = []
        for counts in BATCHES:
            items = sum(counts)
            capacity = (
                None if spare is None else {"user": len(counts) + spare, "item": items + spare}
            )
            tree = BroadcastTree.from_counts({"item": counts}, root="user", capacity=capacity)
            route = tree.route("item", "user")
            live = [tree.live(name) for name in ("user", "item") if tree.live(name) is not None]
            stages = Stages([1], [route.index], [route.offsets], [route.order], live)
            x = [torch.zeros(tree.capacity(n), 90, dtype=HALF) for n in ("user", "item")]
            weight = [torch.zeros(N, 90, dtype=HALF) for _ in x]  # no other test has this width
            gluon_sm90.forward(x, weight, None, stages, None)
            firsts.append(len(seen))
    assert firsts[0] >= 1
    assert firsts == firsts[:1] * len(BATCHES)
