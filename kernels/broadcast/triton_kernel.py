"""The Triton path of `broadcast`: a gather of rows that writes each row once."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.config import row_tile
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import (
    FLOATS,
    MAPS,
    alignment,
    flat_rows,
    guard,
    live_rows,
    parents_at,
    refused,
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What moves in place of the element type: one kernel for all types of a size."""


def unsupported(device: torch.device, x: Tensor, route: Route) -> str | None:
    """Why it cannot take a call, or None.

    Of float dtypes it takes those whose gradients `reduce` can sum.
    """
    if (x.is_floating_point() and x.dtype not in FLOATS) or x.is_complex():
        return refused(device, x.dtype)
    return refused(device)


def forward(x: Tensor, route: Route) -> Tensor:
    """[fine, ...] rows of `x` [coarse, ...]. Its backward is the op `reduce` with `op="sum"`."""
    fine, width = route.fine_rows, math.prod(x.shape[1:])
    out = x.new_empty((fine, *x.shape[1:]))
    if fine == 0 or width == 0:
        return out
    if route.coarse_rows == 0:
        return out.zero_()
    bits = _BITS[x.element_size()]
    x = flat_rows(x, width).view(bits)
    align = alignment(x.stride(0))
    tile = row_tile(width, x.element_size())
    with guard(x):
        launch(
            gather_kernel, (ceil_div(fine, tile.rows), ceil_div(width, tile.columns)),
            x, out.view(bits), route.index, route.live_fine, fine, x.stride(0) // align,
            ALIGN=align, WIDTH=width, R=tile.rows, C=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "step"], do_not_specialize_on_alignment=MAPS)
def gather_kernel(
    x_ptr,
    out_ptr,
    index_ptr,
    live_ptr,
    rows,
    step,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Program (i, j) writes R rows of C columns; zeros to dead rows."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    cols = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    live = row < live_rows(live_ptr, rows)
    parent = parents_at(index_ptr, row, live)[:, None]
    wide = cols < WIDTH
    at = parent * (step.to(tl.int64) * ALIGN) + cols
    x = tl.load(x_ptr + at, mask=live[:, None] & wide, other=0)
    to = row.to(tl.int64)[:, None] * WIDTH + cols
    tl.store(out_ptr + to, x, mask=(row < rows)[:, None] & wide)
