"""The Triton path of `modulate`: every fine row is read once and written once."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.config import row_tile
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import (
    MAPS,
    alignment,
    flat_rows,
    guard,
    live_rows,
    parents_at,
    refused,
)
from ikbo_tree.kernels.common.triton_segments import segment_sum
from ikbo_tree.kernels.modulate.triton_gradients import product_gradients


def unsupported(device: torch.device, operands: Sequence[Tensor | None]) -> str | None:
    """Why it cannot take a call, or None."""
    return refused(device, *(x.dtype for x in operands if x is not None))


def forward(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, route: Route, dtype: torch.dtype
) -> Tensor:
    """[fine, ...] in `dtype`."""
    out = x.new_empty(x.shape, dtype=dtype)
    rows, width = route.fine_rows, math.prod(x.shape[1:])
    if rows == 0 or width == 0:
        return out
    if route.coarse_rows == 0:
        return out.zero_()
    operands = [None if y is None else flat_rows(y, width) for y in (x, scale, shift)]
    aligned = [1 if y is None else alignment(y.stride(0)) for y in operands]
    steps = [0 if y is None else y.stride(0) // a for y, a in zip(operands, aligned, strict=True)]
    tile = row_tile(width, max(x.element_size(), out.element_size()))
    with guard(x):
        launch(
            modulate_kernel, (ceil_div(rows, tile.rows), ceil_div(width, tile.columns)),
            *operands, out, route.index, route.live_fine, rows, *steps,
            X_ALIGN=aligned[0], SCALE_ALIGN=aligned[1], SHIFT_ALIGN=aligned[2], WIDTH=width,
            R=tile.rows, C=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    route: Route,
    dtypes: Sequence[torch.dtype],
    wants: Sequence[bool],
) -> list[Tensor]:
    """The wanted gradients of x, scale and shift."""
    if wants[1]:
        assert x is not None
        assert scale is not None
        return product_gradients(grad, x, scale, route, dtypes, wants)
    found = []
    if wants[0]:
        found.append(forward(grad, scale, None, route, dtypes[0]))
    if wants[2]:
        found.append(segment_sum(grad, route, dtypes[2]))
    return found


@triton.jit
def _rows_of(ptr, rows, cols, step, mask, ALIGN: tl.constexpr):
    at = rows[:, None] * (step.to(tl.int64) * ALIGN) + cols[None, :]
    return tl.load(ptr + at, mask=mask, other=0).to(tl.float32)


@triton.jit(
    do_not_specialize=["rows", "x_step", "scale_step", "shift_step"],
    do_not_specialize_on_alignment=MAPS,
)
def modulate_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    index_ptr,
    live_ptr,
    rows,
    x_step,
    scale_step,
    shift_step,
    X_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    SHIFT_ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Program (i, j) writes R rows of C columns; zeros to dead rows."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * C + tl.arange(0, C)
    live = row < live_rows(live_ptr, rows)
    wide = (cols < WIDTH)[None, :]
    mask = live[:, None] & wide
    parent = parents_at(index_ptr, row, live)
    out = _rows_of(x_ptr, row.to(tl.int64), cols, x_step, mask, X_ALIGN)
    if scale_ptr is not None:
        out *= _rows_of(scale_ptr, parent, cols, scale_step, mask, SCALE_ALIGN)
    if shift_ptr is not None:
        out += _rows_of(shift_ptr, parent, cols, shift_step, mask, SHIFT_ALIGN)
    to = row.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & wide)
