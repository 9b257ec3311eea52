"""What every Triton kernel module shares: what it refuses, device guard, device helpers."""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Kernels were defined under TRITON_INTERPRET=1: they run on the CPU, op by op, for tests."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels take; float64 and integers are left to `torch`."""

_NOTHING = contextlib.nullcontext()


MAPS = ["index_ptr", "offsets_ptr", "order_ptr", "live_ptr"]
"""Arguments whose alignment Triton must not compile a kernel for: maps and live counts are views of
one buffer (`ikbo_tree/tree/schema.py`) and begin anywhere in it."""


def refused(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Why Triton cannot run on this device with these dtypes, or None: the core of `unsupported`.

    Args:
        device: the tensors' device.
        dtypes: dtypes of the float tensors.
    """
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"Triton needs a GPU; the tensors are on {device}"
    for dtype in dtypes:
        if dtype not in FLOATS:
            return f"its kernels take float32, float16 and bfloat16; got {dtype}"
        if INTERPRETED and dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
    return None


def guard(like: Tensor) -> AbstractContextManager[None]:
    """Makes `like`'s device the current one, which is where Triton launches kernels."""
    if not like.is_cuda or like.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(like.device)


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of `tl.dot`: tf32 for float32 only where torch's own matmul may use it."""
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "ieee"
    return "tf32"


def alignment(*sizes: int) -> int:
    """The largest of 16, 8, 4, 2, 1 that divides every size.

    A stride passed to a kernel as `stride // A` beside `A` as a constexpr, and multiplied there,
    keeps 16-byte accesses where they are possible and does not make the kernel compile again for
    every stride.
    """
    for candidate in (16, 8, 4, 2):
        if all(size % candidate == 0 for size in sizes):
            return candidate
    return 1


def flat_rows(x: Tensor, width: int) -> Tensor:
    """`x` [rows, ...] as [rows, width] whose elements of a row are adjacent; a view if it can be.

    Rows may lie at any distance (columns of a larger tensor), or all in one place (expanded).
    """
    flat = x.reshape(x.shape[0], width)
    return flat if width == 1 or flat.stride(1) == 1 else flat.contiguous()


@triton.jit
def live_rows(live_ptr, allocated):
    """The live count: read from `live_ptr` [1], or all that is allocated where that is None."""
    return allocated if live_ptr is None else tl.load(live_ptr)


@triton.jit
def rows_at(order_ptr, positions, mask):
    """Row numbers at sorted positions, int64: through `order_ptr`, or the positions themselves.

    0 where `mask` is false.
    """
    if order_ptr is None:
        rows = tl.where(mask, positions, 0)
    else:
        rows = tl.load(order_ptr + positions, mask=mask, other=0)
    return rows.to(tl.int64)


@triton.jit
def parents_at(index_ptr, rows, mask):
    """Coarse rows of fine rows, int64: through `index_ptr`, or the rows themselves where None.

    0 where `mask` is false.
    """
    if index_ptr is None:
        parents = tl.where(mask, rows, 0)
    else:
        parents = tl.load(index_ptr + rows, mask=mask, other=0)
    return parents.to(tl.int64)
