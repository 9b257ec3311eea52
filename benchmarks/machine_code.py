"""What Hopper's kernels compile to: `python benchmarks/machine_code.py`, on any machine.

Compiles their default forms for sm_90 as tests/offline does, with no GPU, and writes
benchmarks/results/machine-code_sm-90.json: what a form takes, read from its machine code.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from records import write
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.linear_compression import gluon_sm90 as compression
from ikbo_tree.kernels.self_target_attention import gluon_sm90 as both
from ikbo_tree.kernels.target_attention import gluon_backward
from ikbo_tree.kernels.target_attention import gluon_sm90 as attention
from ikbo_tree.kernels.target_attention.memories import Memory

sys.path.append(str(harness.ROOT / "tests"))  # what compiles for GPUs that are not there

TARGET = "sm_90"
_TREE = BroadcastTree.from_counts({"vendor": [2, 1], "item": [5, 3, 1]}, root="user")


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def _compress(partial: torch.dtype) -> None:
    """Two levels at the default widths; row counts make no difference."""
    x = [_zeros(rows, K, 256) for rows, K in ((3, 1178), (5, 866))]
    w = [_zeros(433, K) for K in (1178, 866)]
    stages = Stages([1], [torch.zeros(5, dtype=torch.int32)], [], [], [])
    compression.forward(x, w, None, stages, partial)


def _attention_inputs(D: int, *levels: str) -> tuple[Tensor, list[Memory]]:
    """Queries of 64 rows an item, and keys of each level."""
    memories = []
    for level in levels:
        route, rows = _TREE.route("item", level), _TREE.rows(level)
        k, v, extent = _zeros(rows, 96, 2, D), _zeros(rows, 96, 2, D), torch.zeros(rows).int()
        memories.append(Memory(k, v, extent=extent, index=route.index, offsets=route.offsets))
    return _zeros(_TREE.rows("item"), 64, 2, D), memories


def _attend(D: int, *levels: str) -> None:
    attention.forward(*_attention_inputs(D, *levels), None, 0.1)


def _attend_both() -> None:
    q, (memory,) = _attention_inputs(128, "user")
    both.forward(_zeros(*memory.k.shape[:2], 2, 128), q, memory, None, None, True, 0.1)


def _differentiate() -> None:
    q, memories = _attention_inputs(128, "user")
    lse = torch.zeros(q.shape[:-1])
    args = (torch.zeros_like(q), None, torch.zeros_like(q), lse, q, memories, None, 0.1)
    gluon_backward.backward(*args, [True] * 3)


FORMS: dict[str, tuple[str, Callable[[], None]]] = {
    "lce, 16-bit partials": ("stages_kernel", lambda: _compress(torch.float16)),
    "lce, float32 partials": ("stages_kernel", lambda: _compress(torch.float32)),
    "attn, D = 64": ("attention_forward", lambda: _attend(64, "user")),
    "attn, D = 128": ("attention_forward", lambda: _attend(128, "user")),
    "attn, D = 128, two levels": ("attention_forward", lambda: _attend(128, "user", "vendor")),
    "attn, D = 256": ("attention_forward", lambda: _attend(256, "user")),
    "attn, self and target, causal": ("forward_both", _attend_both),
    "attn, gradient of queries": ("query_gradients", _differentiate),
    "attn, gradients of keys": ("key_gradients", _differentiate),
}
"""Kernel and call of each form that the file has."""


def built(kernel: str, call: Callable[[], None]) -> Any:
    """The first kernel of that name that a call launches, compiled."""
    from offline.compiling import compile_only

    kept: list[Any] = []
    with compile_only(TARGET):
        compile_ = JITFunction.run

        def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = compile_(self, *args, **kwargs)
            if self.__name__ == kernel:
                kept.append(found)
            return found

        with mock.patch.object(JITFunction, "run", keep):
            call()
    return kept[0]


def facts(form: str) -> dict[str, Any]:
    """The record of one form.

    Products are those in the code, of all roles and branches together, by shape; registers the
    most that an instruction names, of a thread. `early` is how many exponentials stand between a
    wait for all products but the last and the wait for that one: what overlaps in one warpgroup.
    """
    from offline.compiling import read
    from offline.miscompiled import miscompiled

    kernel, call = FORMS[form]
    code = built(kernel, call)
    found = read(code, TARGET)
    shapes = Counter(re.findall(r"\bHGMMA\.(64x\d+x16)", found.listing))
    return {
        "workload": form,
        "who": kernel,
        "products": ", ".join(f"{n} of {shape}" for shape, n in sorted(shapes.items())),
        "registers": max(int(n) for n in re.findall(r"\bR(\d+)\b", found.listing)) + 1,
        "spills": found.spills,
        "shared_kib": round(found.shared / 2**10, 1),
        "threads": 32 * code.metadata.num_warps,
        "early": _early(found.listing),
        "serialised": len(re.findall(r"C75\d\d", _complaints(code))),
        "miscompiled": len(miscompiled(found.listing)),
    }


def _early(listing: str) -> int:
    """Exponentials behind `WARPGROUP.DEPBAR` 1, up to the next 0."""
    count, waiting = 0, False
    for which in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)|(MUFU\.EX2)", listing):
        if which[1]:
            count += waiting
        else:
            waiting = which[0] == "0x1"
    return count


def _complaints(code: Any) -> str:
    """What the assembler says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(code.asm["ptx"])
        ptxas = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", f"{path}.o"]
        return subprocess.run(ptxas, capture_output=True, text=True, check=True).stderr


def main() -> None:
    print(f"written to {write('machine-code', TARGET, [facts(form) for form in FORMS])}")


if __name__ == "__main__":
    main()
