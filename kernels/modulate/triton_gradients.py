"""Gradients of products with coarse rows: fine rows are read once, in segments, and summed."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.config import PROGRAMS, SegmentTile, segment_tile
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

TILE_BYTES_OF = 4
"""Tiles are those of float32 whatever the dtype: up to five of them are in registers at once, which
spill at twice the elements."""


@triton.jit
def _walk(
    g_ptr,
    x_ptr,
    dx_ptr,
    scale,
    order_ptr,
    begin,
    length,
    cols,
    g_stride,
    x_stride,
    SHIFTED: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Writes dx of S runs of rows; returns their [S, C] sums of g x and, if `SHIFTED`, of g.

    Rows are spread over R lanes, lane l taking rows l, l + R, ...; lanes are added at the end.
    """
    products = tl.zeros([S, R, C], tl.float32)
    plain = tl.zeros([S, R, C], tl.float32)
    for start in range(0, tl.max(length, axis=0), R):
        at = start + tl.arange(0, R)
        inside = at[None, :] < length[:, None]
        rows = rows_at(order_ptr, begin[:, None] + at[None, :], inside)
        g = load_rows(g_ptr, rows, inside, cols, g_stride, 0.0, WIDTH)
        x = load_rows(x_ptr, rows, inside, cols, x_stride, 0.0, WIDTH)
        products += g * x
        if SHIFTED:
            plain += g
        if dx_ptr is not None:
            dx = (g * scale[:, None, :]).to(dx_ptr.dtype.element_ty)
            mask = inside[:, :, None] & (cols < WIDTH)[None, None, :]
            tl.store(dx_ptr + rows[:, :, None] * WIDTH + cols[None, None, :], dx, mask=mask)
    return tl.sum(products, axis=1), tl.sum(plain, axis=1)


@triton.jit
def _finish(
    d_scale_ptr, d_shift_ptr, segment, mine, cols, a, b, SHIFTED: tl.constexpr, WIDTH: tl.constexpr
):
    store_segments(d_scale_ptr, segment, mine, cols, a, WIDTH)
    if SHIFTED:
        store_segments(d_shift_ptr, segment, mine, cols, b, WIDTH)


@triton.jit
def _piece(
    g_ptr,
    x_ptr,
    scale_ptr,
    dx_ptr,
    d_scale_ptr,
    d_shift_ptr,
    product_ptr,
    plain_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    slot,
    cols,
    g_stride,
    x_stride,
    scale_step,
    SCALE_ALIGN: tl.constexpr,
    SHIFTED: tl.constexpr,
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
    scale = load_segments(scale_ptr, one + segment, yes, cols, scale_step, SCALE_ALIGN, WIDTH)
    first, rows = one + begin + start, one + tl.minimum(length - start, P)
    a, b = _walk(
        g_ptr, x_ptr, dx_ptr, scale, order_ptr, first, rows, cols, g_stride, x_stride,
        SHIFTED, WIDTH, 1, R, C,
    )  # fmt: skip
    if length <= P:
        _finish(d_scale_ptr, d_shift_ptr, one + segment, yes, cols, a, b, SHIFTED, WIDTH)
    else:
        store_partial(product_ptr, 0, slot, cols, a, a, a, 1, WIDTH)
        if SHIFTED:
            store_partial(plain_ptr, 0, slot, cols, b, b, b, 1, WIDTH)


@triton.jit
def _zero_rows(dx_ptr, first, rows, step, cols, WIDTH: tl.constexpr, R: tl.constexpr):
    """Zeros to R rows from `first` on, and again every `step` rows."""
    for start in range(first, rows, step):
        row = start + tl.arange(0, R)
        to = row.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        mask = (row < rows)[:, None] & (cols < WIDTH)[None, :]
        tl.store(dx_ptr + to, tl.zeros(to.shape, dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[*COUNTS, "rows", "g_step", "scale_step"],
    do_not_specialize_on_alignment=MAPS,
)
def product_gradients_kernel(
    g_ptr,
    x_ptr,
    scale_ptr,
    dx_ptr,
    d_scale_ptr,
    d_shift_ptr,
    product_ptr,
    plain_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    slots,
    programs,
    rows,
    g_step,
    x_step,
    scale_step,
    G_ALIGN: tl.constexpr,
    X_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    """Programs 0 .. programs - 1: pieces and dead rows; the others: blocks of short segments."""
    SHIFTED: tl.constexpr = d_shift_ptr is not None
    cols = tl.program_id(1) * C + tl.arange(0, C)
    g_stride = g_step.to(tl.int64) * G_ALIGN
    x_stride = x_step.to(tl.int64) * X_ALIGN
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
                    g_ptr, x_ptr, scale_ptr, dx_ptr, d_scale_ptr, d_shift_ptr, product_ptr,
                    plain_ptr, index_ptr, offsets_ptr, order_ptr, segments, base + lane * programs,
                    cols, g_stride, x_stride, scale_step, SCALE_ALIGN, SHIFTED, WIDTH, S * R, C,
                    T, P,
                )  # fmt: skip
                lane = next_lane(start < length, lane)
        if dx_ptr is not None:
            first_dead = tl.load(offsets_ptr + segments) + program * S * R
            _zero_rows(dx_ptr, first_dead, rows, programs * S * R, cols, WIDTH, S * R)
    else:
        segment, begin, length, mine = short_segments(
            program - programs, offsets_ptr, segments, S, T
        )
        scale = load_segments(scale_ptr, segment, mine, cols, scale_step, SCALE_ALIGN, WIDTH)
        a, b = _walk(
            g_ptr, x_ptr, dx_ptr, scale, order_ptr, begin, length, cols, g_stride, x_stride,
            SHIFTED, WIDTH, S, R, C,
        )  # fmt: skip
        _finish(d_scale_ptr, d_shift_ptr, segment, mine, cols, a, b, SHIFTED, WIDTH)


def product_gradients(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    route: Route,
    dtypes: Sequence[torch.dtype],
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients of `x * scale[index] + shift[index]`, that of scale among them.

    Args:
        grad: [fine, ...] float32 or 16 bits. Dead rows are never read.
        x: [fine, ...], likewise.
        scale: [coarse, ...].
        route: where the rows of the fine level lie.
        dtypes: of the gradients of x, scale and shift.
        wants: which of them are wanted; scale's is.

    Returns:
        The wanted ones, contiguous; zero in dead and childless rows. Sums are taken in float32.
    """
    fine, coarse, width = route.fine_rows, route.coarse_rows, math.prod(x.shape[1:])
    shapes = (x.shape, scale.shape, scale.shape)
    made = [
        grad.new_empty(shape, dtype=dtype) if want else None
        for shape, dtype, want in zip(shapes, dtypes, wants, strict=True)
    ]
    found = [dx for dx in made if dx is not None]
    if fine == 0 or coarse == 0 or width == 0:
        return [dx.zero_() for dx in found]
    g, x, scale = (flat_rows(y, width) for y in (grad, x, scale))
    aligned = [alignment(y.stride(0)) for y in (g, x, scale)]
    tile = segment_tile(width, TILE_BYTES_OF)
    partials = [partial_results(x, 1, tile), partial_results(x, 1, tile) if wants[2] else None]
    _launch(g, x, scale, made, partials, route, aligned, tile)
    return found


def _launch(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    made: Sequence[Tensor | None],
    partials: Sequence[Tensor | None],
    route: Route,
    aligned: Sequence[int],
    tile: SegmentTile,
) -> None:
    fine, width = x.shape
    slots = ceil_div(fine, tile.short)
    programs = min(slots, PROGRAMS)
    grid = programs + ceil_div(route.coarse_rows, tile.segments), ceil_div(width, tile.columns)
    steps = [y.stride(0) // align for y, align in zip((g, x, scale), aligned, strict=True)]
    with guard(x):
        launch(
            product_gradients_kernel, grid,
            g, x, scale, *made, *partials, route.index, route.offsets, route.order,
            route.coarse_rows, slots, programs, fine, *steps,
            G_ALIGN=aligned[0], X_ALIGN=aligned[1], SCALE_ALIGN=aligned[2], WIDTH=width,
            S=tile.segments, R=tile.rows, C=tile.columns, T=tile.short, P=tile.piece,
            num_warps=tile.num_warps,
        )  # fmt: skip
        for out, partial in zip(made[1:], partials, strict=True):
            if out is not None and partial is not None:
                combine("sum", out, partial, route, tile)
