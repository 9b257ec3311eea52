"""The gradient of a coarse part of a norm, summed over its segments without being held before."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.config import PROGRAMS, segment_tile
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_folds import (
    LANES,
    load_rows,
    load_segments,
    next_lane,
    piece_of,
    short_segments,
    store_partial,
    store_segments,
)
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import MAPS, alignment, flat_rows, guard, rows_at
from ikbo_tree.kernels.common.triton_segments import COUNTS, combine, partial_results


@triton.jit
def _walk(
    g_ptr,
    x,
    weight_ptr,
    numbers_ptr,
    fine,
    order_ptr,
    begin,
    length,
    cols,
    g_stride,
    CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[S, C] sums over S runs of rows of rstd (g weight - a - (x - mean) rstd b).

    Rows are spread over R lanes, lane l taking rows l, l + R, ...; lanes are added at the end.
    """
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    total = tl.zeros([S, R, C], tl.float32)
    plane = fine.to(tl.int64)
    for start in range(0, tl.max(length, axis=0), R):
        at = start + tl.arange(0, R)
        inside = at[None, :] < length[:, None]
        rows = rows_at(order_ptr, begin[:, None] + at[None, :], inside)
        h = load_rows(g_ptr, rows, inside, cols, g_stride, 0.0, WIDTH)
        if weight_ptr is not None:
            h *= weight[None, None, :]
        # All 0 outside, and so is what is summed.
        rstd = tl.load(numbers_ptr + rows, mask=inside, other=0.0)[:, :, None]
        slope = tl.load(numbers_ptr + 3 * plane + rows, mask=inside, other=0.0)[:, :, None]
        shifted = tl.broadcast_to(x[:, None, :], h.shape)
        if CENTRED:
            h -= tl.load(numbers_ptr + plane + rows, mask=inside, other=0.0)[:, :, None]
            shifted -= tl.load(numbers_ptr + 2 * plane + rows, mask=inside, other=0.0)[:, :, None]
        # What x holds may be infinite, and a row outside adds nothing of it.
        total += tl.where(inside[:, :, None], rstd * (h - shifted * slope), 0.0)
    return tl.sum(total, axis=1)


@triton.jit
def _piece(
    g_ptr,
    x_ptr,
    weight_ptr,
    numbers_ptr,
    dx_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    slot,
    fine,
    cols,
    g_stride,
    x_step,
    X_ALIGN: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    segment, begin, length, _, start = piece_of(
        slot, index_ptr, offsets_ptr, order_ptr, segments, T, P
    )
    one = tl.zeros([1], tl.int32)
    yes = one == 0
    x = load_segments(x_ptr, one + segment, yes, cols, x_step, X_ALIGN, WIDTH)
    first, rows = one + begin + start, one + tl.minimum(length - start, P)
    value = _walk(
        g_ptr, x, weight_ptr, numbers_ptr, fine, order_ptr, first, rows, cols, g_stride,
        CENTRED, WIDTH, 1, R, C,
    )  # fmt: skip
    if length <= P:
        store_segments(dx_ptr, one + segment, yes, cols, value, WIDTH)
    else:
        store_partial(partial_ptr, 0, slot, cols, value, value, value, 1, WIDTH)


@triton.jit(do_not_specialize=[*COUNTS, "rows", "g_step"], do_not_specialize_on_alignment=MAPS)
def coarse_gradient_kernel(
    g_ptr,
    x_ptr,
    weight_ptr,
    numbers_ptr,
    dx_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    slots,
    programs,
    rows,
    g_step,
    x_step,
    G_ALIGN: tl.constexpr,
    X_ALIGN: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    """Programs 0 .. programs - 1: pieces of long segments; the others: blocks of short ones."""
    cols = tl.program_id(1) * C + tl.arange(0, C)
    g_stride = g_step.to(tl.int64) * G_ALIGN
    program = tl.program_id(0)
    if program < programs:
        for base in range(program, slots, programs * LANES):
            mine = base + tl.arange(0, LANES) * programs
            _, _, length, _, start = piece_of(
                mine, index_ptr, offsets_ptr, order_ptr, segments, T, P
            )
            lane = next_lane(start < length, -1)
            while lane < LANES:
                _piece(
                    g_ptr, x_ptr, weight_ptr, numbers_ptr, dx_ptr, partial_ptr, index_ptr,
                    offsets_ptr, order_ptr, segments, base + lane * programs, rows, cols,
                    g_stride, x_step, X_ALIGN, CENTRED, WIDTH, S * R, C, T, P,
                )  # fmt: skip
                lane = next_lane(start < length, lane)
    else:
        segment, begin, length, mine = short_segments(
            program - programs, offsets_ptr, segments, S, T
        )
        x = load_segments(x_ptr, segment, mine, cols, x_step, X_ALIGN, WIDTH)
        value = _walk(
            g_ptr, x, weight_ptr, numbers_ptr, rows, order_ptr, begin, length, cols, g_stride,
            CENTRED, WIDTH, S, R, C,
        )  # fmt: skip
        store_segments(dx_ptr, segment, mine, cols, value, WIDTH)


def coarse_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    numbers: Tensor,
    route: Route,
    centred: bool,
) -> Tensor:
    """The gradient of a coarse part.

    Args:
        grad: [fine, width] the part's columns of the result's gradient. Dead rows are never read.
        x: [coarse, width].
        weight: [width] its columns of the weight; None: ones.
        numbers: [4, fine] float32: rstd, a, mean and rstd b of each row (`norm_gradients_kernel`).
        route: where the rows of the fine level lie.
        centred: whether the mean is taken away.

    Returns:
        [coarse, width] in `x`'s dtype; zero in dead and childless rows. Summed in float32.
    """
    (fine, width), coarse = grad.shape, route.coarse_rows
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if coarse == 0 or width == 0:
        return dx
    x = flat_rows(x, width)
    g_align, x_align = alignment(grad.stride(0)), alignment(x.stride(0))
    # Tiles of float32 whatever the dtype: what is computed with is.
    tile = segment_tile(width, 4)
    slots = ceil_div(fine, tile.short) if fine > tile.short else 0
    programs = min(slots, PROGRAMS)
    partial = partial_results(grad, 1, tile)
    grid = programs + ceil_div(coarse, tile.segments), ceil_div(width, tile.columns)
    with guard(grad):
        launch(
            coarse_gradient_kernel, grid,
            grad, x, weight, numbers, dx, partial, route.index, route.offsets, route.order,
            coarse, slots, programs, fine, grad.stride(0) // g_align, x.stride(0) // x_align,
            G_ALIGN=g_align, X_ALIGN=x_align, CENTRED=centred, WIDTH=width, S=tile.segments,
            R=tile.rows, C=tile.columns, T=tile.short, P=tile.piece, num_warps=tile.num_warps,
        )  # fmt: skip
        combine("sum", dx, partial, route, tile)
    return dx
