"""Compiles Triton kernels for GPUs that this machine does not have, and reads what came out."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory that a block may have."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes.

    Attributes:
        target: a key of `TARGETS`.
        registers: 32-bit registers a thread (vector registers on AMD).
        spills: bytes stored to local memory a thread (spilled vector registers on AMD).
        shared: bytes of shared memory a block.
        hgmma: warpgroup matrix instructions (sm_90 only).
        widest_load: bits of the widest global load.
        widest_store: bits of the widest global store.
        listing: SASS or GCN assembly.
    """

    target: str
    registers: int
    spills: int
    shared: int
    hgmma: int
    widest_load: int
    widest_store: int
    listing: str

    @property
    def fits(self) -> bool:
        """Its shared memory exists."""
        return self.shared <= SHARED_LIMIT[self.target]


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: str,
    *,
    aligned: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compiles a `@triton.jit` function, or raises what the compiler raises.

    Args:
        kernel: the function.
        signature: Triton's type of each run-time argument, `"*fp16"`, `"i32"`, ...
        constexprs: value of each constexpr argument, and None for pointers left out.
        target: a key of `TARGETS`.
        aligned: arguments that the run-time finds divisible by 16; all pointers are.
        num_warps: as at launch.
        num_stages: as at launch.
    """
    names = kernel.arg_names
    missing = set(names) ^ (set(signature) | set(constexprs))
    assert not missing, f"arguments that do not match the kernel's: {sorted(missing)}"
    types = {n: "constexpr" if n in constexprs else signature[n] for n in names}
    divisible = [n for n in signature if signature[n].startswith("*") or n in aligned]
    source = ASTSource(
        kernel,
        types,
        constexprs=dict(constexprs),
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=TARGETS[target], options=options)
    return read(built, target)


def read(built: Any, target: str) -> Compiled:
    """What a kernel that Triton compiled for the target takes."""
    return (_read_amd if target.startswith("gfx") else _read_nvidia)(built, target)


class _Absent:
    """Stands in for the driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Kernels are cached by device: none that exists, another one for each target.
        return -1 - list(TARGETS.values()).index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compile_only(target: str = "sm_90") -> Iterator[list[str]]:
    """Inside, kernels launched on CPU tensors are compiled for `target`, and nothing runs.

    This goes through Triton's own launcher, so that it sees arguments as they will be on a GPU:
    which are specialised for, and whether another batch would compile again. Call an op's Triton
    module itself: its `unsupported` refuses CPU tensors.

    Yields:
        A list that grows by an entry for every compilation.
    """
    compiled: list[str] = []
    run = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    hook, active = knobs.runtime.jit_cache_hook, driver._active
    driver.set_active(_Absent(TARGETS[target]))
    knobs.runtime.jit_cache_hook = lambda **about: compiled.append(about["repr"])
    JITFunction.run = warm
    try:
        yield compiled
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook
        driver._active = active


def _read_amd(built: Any, target: str) -> Compiled:
    listing = built.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", listing)[1])

    return Compiled(
        target,
        registers=field("vgpr_count"),
        spills=field("vgpr_spill_count"),
        shared=built.metadata.shared,
        hgmma=0,
        widest_load=_widest(r"(?:global|buffer)_load_(?:dword(?:x(\d))?|\w+)", listing, 32),
        widest_store=_widest(r"(?:global|buffer)_store_(?:dword(?:x(\d))?|\w+)", listing, 32),
        listing=listing,
    )


def _read_nvidia(built: Any, target: str) -> Compiled:
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(TARGETS[target].arch).path
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(built.asm["cubin"])
        ptx.write_text(built.asm["ptx"])
        name = re.search(r"\.target\s+(sm_\w+)", built.asm["ptx"])[1]
        said = _run(ptxas, "-v", f"--gpu-name={name}", ptx, "-o", f"{ptx}.o")
        listing = _run(TOOLS / "nvdisasm", "-c", cubin)
    return Compiled(
        target,
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spills=int(re.search(r"(\d+) bytes spill stores", said)[1]),
        shared=built.metadata.shared,
        hgmma=len(re.findall(r"\bHGMMA\b", listing)),
        widest_load=_widest(r"\bLDG\.E(?:\.\w+)*?(?:\.(64|128))?(?:\.\w+)*\s", listing, 1),
        widest_store=_widest(r"\bSTG\.E(?:\.\w+)*?(?:\.(64|128))?(?:\.\w+)*\s", listing, 1),
        listing=listing,
    )


def _widest(pattern: str, listing: str, unit: int) -> int:
    """Bits of the widest access; 32 for all that is not wider."""
    widths = [int(m[1]) * unit if m[1] else 32 for m in re.finditer(pattern, listing)]
    return max(widths, default=0)


def _run(*command: Any) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
