"""Rows computed from what was reduced over their segment: softmax and several gradients.

Each value depends on its own row and on what was reduced over its segment. Short segments, and long
ones of a single piece, are reduced and written by one program, which reads its rows twice, the
second time from a cache. The rest takes three launches: reduce pieces, combine, write.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.config import PROGRAMS, segment_tile
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_folds import (
    LANES,
    exponential,
    finite,
    fold,
    load_rows,
    next_lane,
    piece_of,
    short_segments,
    store_partial,
)
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import MAPS, alignment, flat_rows, guard, rows_at
from ikbo_tree.kernels.common.triton_segments import COUNTS, combine, partial_results

PLANES = {"softmax": 2, "softmax_grad": 3, "logsumexp_grad": 2, "ties": 1}
"""What can be written, and how many numbers a column its reduction over a segment has."""


@triton.jit
def _of_segment(ptr, segment, mine, cols, WIDTH: tl.constexpr):
    """[S, C] float32 rows of a tensor at the coarse level; 0 without `ptr`."""
    if ptr is None:
        value = tl.zeros([segment.shape[0], cols.shape[0]], tl.float32)
    else:
        at = segment.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        mask = mine[:, None] & (cols < WIDTH)[None, :]
        value = tl.load(ptr + at, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def _exponential_of_difference(x, base, FULL: tl.constexpr):
    """exp(x - base), for `FULL` with what the difference lost to rounding: up to |x| / 2 ulp."""
    d = x - base
    y = exponential(d, FULL)
    if FULL:
        b = d - x
        lost = (x - (d - b)) - (base + b)
        y += y * tl.where(lost == lost, lost, 0.0)  # NaN where x is infinite
    return y


@triton.jit
def _write(
    x_ptr,
    g_ptr,
    y_ptr,
    order_ptr,
    first,
    length,
    cols,
    x_stride,
    g_stride,
    extreme,
    share,
    peak,
    total,
    weighted,
    OP: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Writes the rows of S runs, given what was reduced over their segments, all [S, C]."""
    if OP == "ties":
        # A segment that holds NaN has no tie: 0 / 0, which spreads NaN over it as in torch.amax.
        scale = tl.div_rn(share, peak)
    else:
        scale = tl.div_rn(tl.full([S, C], 1.0, tl.float32), tl.where(total == 0, 1.0, total))
        if OP == "logsumexp_grad":
            scale *= share
    FULL: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    mean = weighted * scale
    base = finite(peak)
    for start in range(0, tl.max(length, axis=0), R):
        at = start + tl.arange(0, R)
        inside = at[None, :] < length[:, None]
        rows = rows_at(order_ptr, first[:, None] + at[None, :], inside)
        x = load_rows(x_ptr, rows, inside, cols, x_stride, 0.0, WIDTH)
        if OP == "ties":
            y = (x == extreme[:, None, :]).to(tl.float32) * scale[:, None, :]
        else:
            y = _exponential_of_difference(x, base[:, None, :], FULL) * scale[:, None, :]
            if OP == "softmax_grad":
                g = load_rows(g_ptr, rows, inside, cols, g_stride, 0.0, WIDTH)
                y *= g - mean[:, None, :]
        to = rows[:, :, None] * WIDTH + cols[None, None, :]
        mask = inside[:, :, None] & (cols < WIDTH)[None, None, :]
        tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero_rows(
    y_ptr, first, rows, step, cols, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Zeros to R rows from `first` on, and again every `step` rows."""
    for start in range(first, rows, step):
        row = start + tl.arange(0, R)
        to = row.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        mask = (row < rows)[:, None] & (cols < WIDTH)[None, :]
        tl.store(y_ptr + to, tl.zeros([R, C], y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _piece(
    x_ptr,
    g_ptr,
    extreme_ptr,
    share_ptr,
    y_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    slot,
    slots,
    cols,
    x_stride,
    g_stride,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    """Reduces a piece, and writes it where it is the only one; `AFTER` all are, writes it."""
    segment, begin, length, first_slot, start = piece_of(
        slot, index_ptr, offsets_ptr, order_ptr, segments, T, P
    )
    plane = slots.to(tl.int64) * WIDTH
    one = tl.zeros([1], tl.int32)
    yes = one == 0
    first, count = one + begin + start, one + tl.minimum(length - start, P)
    extreme = _of_segment(extreme_ptr, one + segment, yes, cols, WIDTH)
    if AFTER:
        a = _of_segment(partial_ptr, one + first_slot, yes, cols, WIDTH)
        b, c = a, a
        if PLANES > 1:
            b = _of_segment(partial_ptr + plane, one + first_slot, yes, cols, WIDTH)
        if PLANES > 2:
            c = _of_segment(partial_ptr + 2 * plane, one + first_slot, yes, cols, WIDTH)
    else:
        a, b, c = fold(
            x_ptr, g_ptr, extreme, order_ptr, first, count, cols, x_stride, g_stride,
            OP, PLANES, WIDTH, 1, R, C,
        )  # fmt: skip
    if AFTER or length <= P:
        share = _of_segment(share_ptr, one + segment, yes, cols, WIDTH)
        _write(
            x_ptr, g_ptr, y_ptr, order_ptr, first, count, cols, x_stride, g_stride,
            extreme, share, a, b, c, OP, WIDTH, 1, R, C,
        )  # fmt: skip
    else:
        store_partial(partial_ptr, plane, slot, cols, a, b, c, PLANES, WIDTH)


@triton.jit
def _short(
    x_ptr,
    g_ptr,
    extreme_ptr,
    share_ptr,
    y_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    block,
    cols,
    x_stride,
    g_stride,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
):
    segment, first, count, mine = short_segments(block, offsets_ptr, segments, S, T)
    extreme = _of_segment(extreme_ptr, segment, mine, cols, WIDTH)
    share = _of_segment(share_ptr, segment, mine, cols, WIDTH)
    a, b, c = fold(
        x_ptr, g_ptr, extreme, order_ptr, first, count, cols, x_stride, g_stride,
        OP, PLANES, WIDTH, S, R, C,
    )  # fmt: skip
    _write(
        x_ptr, g_ptr, y_ptr, order_ptr, first, count, cols, x_stride, g_stride,
        extreme, share, a, b, c, OP, WIDTH, S, R, C,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*COUNTS, "rows", "g_step"], do_not_specialize_on_alignment=MAPS)
def rows_kernel(
    x_ptr,
    g_ptr,
    extreme_ptr,
    share_ptr,
    y_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    segments,
    slots,
    programs,
    rows,
    x_step,
    g_step,
    X_ALIGN: tl.constexpr,
    G_ALIGN: tl.constexpr,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    AFTER: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    """Programs 0 .. programs - 1: pieces and dead rows; the others: blocks of short segments.

    With `AFTER` only the pieces of segments of several pieces, whose reductions are combined.
    """
    cols = tl.program_id(1) * C + tl.arange(0, C)
    x_stride = x_step.to(tl.int64) * X_ALIGN
    g_stride = g_step.to(tl.int64) * G_ALIGN
    program = tl.program_id(0)
    if program < programs:
        for base in range(program, slots, programs * LANES):
            mine = base + tl.arange(0, LANES) * programs
            _, _, length, _, start = piece_of(
                mine, index_ptr, offsets_ptr, order_ptr, segments, T, P
            )
            wanted = start < length
            if AFTER:
                wanted &= length > P
            lane = next_lane(wanted, -1)
            while lane < LANES:
                _piece(
                    x_ptr, g_ptr, extreme_ptr, share_ptr, y_ptr, partial_ptr, index_ptr,
                    offsets_ptr, order_ptr, segments, base + lane * programs, slots, cols,
                    x_stride, g_stride, OP, PLANES, AFTER, WIDTH, S * R, C, T, P,
                )  # fmt: skip
                lane = next_lane(wanted, lane)
        if not AFTER:
            first_dead = tl.load(offsets_ptr + segments) + program * S * R
            _zero_rows(y_ptr, first_dead, rows, programs * S * R, cols, WIDTH, S * R, C)
    else:
        _short(
            x_ptr, g_ptr, extreme_ptr, share_ptr, y_ptr, offsets_ptr, order_ptr, segments,
            program - programs, cols, x_stride, g_stride, OP, PLANES, WIDTH, S, R, C, T,
        )  # fmt: skip


def rowwise(
    op: str,
    x: Tensor,
    route: Route,
    *,
    grad: Tensor | None = None,
    extreme: Tensor | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """What `op` writes for each fine row.

    With m the maximum of x over the row's segment, z the sum of exp(x - m), p = exp(x - m) / z:

        softmax         p
        softmax_grad    p (grad - sum of p grad over the segment)
        logsumexp_grad  p share
        ties            share / (rows equal to `extreme`) in those rows, 0 in the others

    Args:
        op: one of `PLANES`.
        x: [fine, ...] float32 or 16 bits. Dead rows are never read.
        route: where the rows of the fine level lie.
        grad: [fine, ...], for `softmax_grad`.
        extreme: [coarse, ...], for `ties`.
        share: [coarse, ...], for `ties` and `logsumexp_grad`.

    Returns:
        [fine, ...] in `x`'s dtype, contiguous; dead rows are zero.
    """
    fine, coarse, width = route.fine_rows, route.coarse_rows, math.prod(x.shape[1:])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if fine == 0 or width == 0:
        return y
    if coarse == 0:
        return y.zero_()
    x = flat_rows(x, width)
    g = None if grad is None else flat_rows(grad, width)
    x_align = alignment(x.stride(0))
    g_align = 1 if g is None else alignment(g.stride(0))
    tile = segment_tile(width, x.element_size())
    slots, blocks = ceil_div(fine, tile.short), ceil_div(coarse, tile.segments)
    columns = ceil_div(width, tile.columns)
    programs, planes = min(slots, PROGRAMS), PLANES[op]
    partial = partial_results(x, planes, tile)

    def write(after: bool) -> None:
        launch(
            rows_kernel, (programs if after else programs + blocks, columns),
            x, g, extreme, share, y, partial, route.index, route.offsets, route.order,
            coarse, slots, programs, fine, x.stride(0) // x_align,
            0 if g is None else g.stride(0) // g_align,
            when=not after or partial.shape[1] > 0, X_ALIGN=x_align, G_ALIGN=g_align, OP=op,
            PLANES=planes, AFTER=after, WIDTH=width, S=tile.segments, R=tile.rows, C=tile.columns,
            T=tile.short, P=tile.piece, num_warps=tile.num_warps,
        )  # fmt: skip

    with guard(x):
        write(after=False)
        combine(op, None, partial, route, tile)
        write(after=True)
    return y
