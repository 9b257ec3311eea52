"""What the Hopper kernel of `linear_compression` compiles to, read from its machine code."""

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
from ikbo_tree.kernels.linear_compression import gluon_sm90
from ikbo_tree.kernels.linear_compression.gluon_config import TILES, Tile, choose

HALF, BRAIN = torch.float16, torch.bfloat16


def forward(rows, K, M, N, dtype=HALF, partial_dtype=None, consumer=None):
    """A call whose values nobody looks at: what is launched is compiled, and nothing runs."""
    x = [torch.zeros(n, k, N, dtype=dtype) for n, k in zip(rows, K, strict=True)]
    weight = [torch.zeros(M, k, dtype=dtype) for k in K]
    consumer = list(range(1, len(rows))) if consumer is None else consumer
    index = [torch.zeros(rows[c], dtype=torch.int32) for c in consumer]
    gluon_sm90.forward(x, weight, None, Stages(consumer, index, [], [], []), partial_dtype)


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


def check(kernels, folder, *, columns, partials=True, spills=0):
    """Products of the whole width by the tensor cores, all by the copy engine, nothing spilled."""
    for built in kernels:
        found = read(built, "sm_90")
        assert found.spills <= spills
        assert found.fits
        assert set(re.findall(r"HGMMA\.64x(\d+)x16", found.listing)) == columns
        assert "UTMALDG.3D" in found.listing
        assert not re.search(r"\bC75\d\d\b", assembler_says(built, folder))
        assert not miscompiled(found.listing)
        registers = {int(n) for n in re.findall(r"\bR(\d+)\b", found.listing)}
        assert max(registers) < 248
        if partials:
            assert found.widest_load == found.widest_store == 128


CASES = {
    "default": (((3, 5), (1178, 866), 433, 256), {}, {"256", "128"}),
    "rounded partials": (((3, 5), (1178, 866), 433, 256), {"partial_dtype": HALF}, {"256", "128"}),
    "bfloat16": (
        ((3, 5), (1178, 866), 433, 256),
        {"dtype": BRAIN, "partial_dtype": BRAIN},
        {"256", "128"},
    ),
    "four levels": (((2, 3, 5, 9), (64, 65, 20, 0), 128, 256), {}, {"256"}),
    "three producers": (
        ((2, 3, 4, 9), (64, 65, 20, 1), 433, 256),
        {"consumer": [3, 3, 3]},
        {"256", "128"},
    ),
    "two launches": (((2, 3, 4, 5, 6, 7), (100,) * 6, 433, 256), {}, {"256", "128"}),
    "128 columns": (((3, 5), (511, 20), 433, 128), {}, {"128", "64"}),
    "128 columns, long": (((3, 5), (1178, 866), 433, 128), {}, {"128", "64"}),
    "64 columns": (((3, 5), (511, 20), 470, 64), {}, {"64"}),
    "one row": (((3, 5), (20, 1), 1, 8), {}, {"32"}),
    "wide": (((3, 5), (1178, 866), 64, 512), {}, {"128"}),
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
    # A third producer is one address too many, once a tile.
    spills = 4 if case == "three producers" else 0
    check(compiled(monkeypatch, *args, **options), tmp_path, columns=columns, spills=spills)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"ahead": False}, {"outstanding": 0}, {"prefetch": 1}, {"branch": False}], ids=str
)
def test_variants(monkeypatch, tmp_path, change):
    monkeypatch.setattr(gluon_sm90, "choose", lambda *args: replace(choose(*args), **change))
    kernels = compiled(monkeypatch, (3, 5), (1178, 866), 433, 256, partial_dtype=HALF)
    check(kernels, tmp_path, columns={"256", "128"})


# Sizes 1, 16 and between are what Triton would specialise a kernel for.
BATCHES = [[1], [16], [5, 3], [4] * 16, [300, 148], [7] * 33, [0, 0, 2]]


@pytest.mark.parametrize("spare", [None, 5])
def test_row_counts_compile_nothing(spare):
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
            x = [torch.zeros(tree.capacity(n), 70, 8, dtype=HALF) for n in ("user", "item")]
            weight = [torch.zeros(300, 70, dtype=HALF) for _ in x]  # no other test has so many rows
            gluon_sm90.forward(x, weight, None, stages, None)
            firsts.append(len(seen))
    assert firsts[0] >= 1
    assert firsts == firsts[:1] * len(BATCHES)


def test_tiles_follow_the_width_alone():
    assert [choose(N, 4).BN for N in (8, 64, 72, 128, 136, 256, 320, 512)] == [
        64, 64, 128, 128, 256, 256, 128, 256,
    ]  # fmt: skip
    assert choose(256, 2).prefetch == 2
    assert choose(256, 4).prefetch == 1, "whole float32 partials do not fit beside accumulators"
    for BN, tile in TILES.items():
        assert tile.BN == BN
    for wrong in ({"BN": 96, "stages": 4}, {"BN": 64, "stages": 3}):
        with pytest.raises(ValueError, match="must be"):
            Tile(**wrong)
