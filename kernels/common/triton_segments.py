"""Reductions over segments of rows, in an order fixed by each segment's own rows (contracts 4, 8).

Segments of up to T rows are short: a program reduces S of them side by side. A longer segment is
cut into pieces of P rows from its first row on; a program reduces one piece, and where there are
several, a second launch combines their partial results. Pieces are numbered without any counting:
the sorted rows 0, T, 2 T, ... that lie in a segment of more than T rows are at least as many as its
pieces (P >= 2 T), so row k T, slot k, stands for the piece that comes as many after the first one
as that row comes after the first such row of its segment. Most slots stand for no piece, so that a
program looks at many of them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.config import PROGRAMS, SegmentTile, segment_tile
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_folds import (
    LANES,
    combine_pieces,
    finite,
    fold,
    next_lane,
    piece_of,
    short_segments,
    store_partial,
    store_segments,
)
from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import MAPS, alignment, flat_rows, guard

COUNTS = ["segments", "slots", "programs", "x_step"]
"""Arguments that Triton must not compile a kernel for: their values change with every batch."""


@triton.jit
def _finish(
    out_ptr,
    live_ptr,
    segment,
    mine,
    length,
    cols,
    value,
    total,
    OP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes [S, C] results; zeros to segments beyond the live count."""
    if OP == "mean":
        count = tl.maximum(length, 1).to(tl.float32)
        value = tl.div_rn(value, tl.broadcast_to(count[:, None], value.shape))
    elif OP == "logsumexp":
        value = tl.log(total) + finite(value)
    if live_ptr is not None:
        value = tl.where((segment < tl.load(live_ptr))[:, None], value, 0.0)
    store_segments(out_ptr, segment, mine, cols, value, WIDTH)


@triton.jit
def _reduce_piece(
    x_ptr,
    out_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    live_ptr,
    segments,
    slot,
    slots,
    cols,
    stride,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
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
    first, rows = one + begin + start, one + tl.minimum(length - start, P)
    a, b, c = fold(
        x_ptr, None, None, order_ptr, first, rows, cols, stride, 0, OP, PLANES, WIDTH, 1, R, C
    )
    if length <= P:
        _finish(out_ptr, live_ptr, one + segment, one == 0, rows, cols, a, b, OP, WIDTH)
    else:
        plane = slots.to(tl.int64) * WIDTH
        store_partial(partial_ptr, plane, slot, cols, a, b, c, PLANES, WIDTH)


@triton.jit
def _reduce_short(
    x_ptr,
    out_ptr,
    offsets_ptr,
    order_ptr,
    live_ptr,
    segments,
    block,
    cols,
    stride,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
):
    segment, first, rows, mine = short_segments(block, offsets_ptr, segments, S, T)
    a, b, _ = fold(
        x_ptr, None, None, order_ptr, first, rows, cols, stride, 0, OP, PLANES, WIDTH, S, R, C
    )
    _finish(out_ptr, live_ptr, segment, mine, rows, cols, a, b, OP, WIDTH)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def reduce_kernel(
    x_ptr,
    out_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    live_ptr,
    segments,
    slots,
    programs,
    x_step,
    X_ALIGN: tl.constexpr,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    """Programs 0 .. programs - 1: pieces of long segments; the others: blocks of short ones."""
    cols = tl.program_id(1) * C + tl.arange(0, C)
    stride = x_step.to(tl.int64) * X_ALIGN
    program = tl.program_id(0)
    if program < programs:
        for base in range(program, slots, programs * LANES):
            mine = base + tl.arange(0, LANES) * programs
            _, _, length, _, start = piece_of(
                mine, index_ptr, offsets_ptr, order_ptr, segments, T, P
            )
            lane = next_lane(start < length, -1)
            while lane < LANES:
                _reduce_piece(
                    x_ptr, out_ptr, partial_ptr, index_ptr, offsets_ptr, order_ptr, live_ptr,
                    segments, base + lane * programs, slots, cols, stride,
                    OP, PLANES, WIDTH, S * R, C, T, P,
                )  # fmt: skip
                lane = next_lane(start < length, lane)
    else:
        _reduce_short(
            x_ptr, out_ptr, offsets_ptr, order_ptr, live_ptr, segments, program - programs,
            cols, stride, OP, PLANES, WIDTH, S, R, C, T,
        )  # fmt: skip


@triton.jit
def _combine_segment(
    out_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    live_ptr,
    segments,
    candidate,
    slots,
    cols,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    segment, begin, length, _, _ = piece_of(
        candidate, index_ptr, offsets_ptr, order_ptr, segments, P, P
    )
    plane = slots.to(tl.int64) * WIDTH
    slot, pieces = tl.cdiv(begin, T), tl.cdiv(length, P)
    one = tl.zeros([1], tl.int32)
    a, b, c = combine_pieces(partial_ptr, plane, slot, pieces, cols, OP, PLANES, WIDTH, R, C)
    if out_ptr is None:
        store_partial(partial_ptr, plane, slot, cols, a, b, c, PLANES, WIDTH)
    else:
        _finish(out_ptr, live_ptr, one + segment, one == 0, one + length, cols, a, b, OP, WIDTH)


@triton.jit(
    do_not_specialize=["segments", "slots", "candidates"], do_not_specialize_on_alignment=MAPS
)
def combine_kernel(
    out_ptr,
    partial_ptr,
    index_ptr,
    offsets_ptr,
    order_ptr,
    live_ptr,
    segments,
    slots,
    candidates,
    OP: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    P: tl.constexpr,
):
    """Combines the pieces of each segment of more than P rows.

    One of the sorted rows 0, P, 2 P, ..., the candidates, is the first of them in such a segment.
    Without `out_ptr` the results take the place of the segment's first partial ones.
    """
    cols = tl.program_id(1) * C + tl.arange(0, C)
    programs = tl.num_programs(0)
    for base in range(tl.program_id(0), candidates, programs * LANES):
        mine = base + tl.arange(0, LANES) * programs
        _, _, length, _, start = piece_of(mine, index_ptr, offsets_ptr, order_ptr, segments, P, P)
        wanted = (length > 0) & (start == 0)
        lane = next_lane(wanted, -1)
        while lane < LANES:
            _combine_segment(
                out_ptr, partial_ptr, index_ptr, offsets_ptr, order_ptr, live_ptr, segments,
                base + lane * programs, slots, cols, OP, PLANES, WIDTH, R, C, T, P,
            )  # fmt: skip
            lane = next_lane(wanted, lane)


def reduce_segments(x: Tensor, route: Route, op: str, dtype: torch.dtype) -> Tensor:
    """The rows of each segment reduced by `op`, accumulated in float32.

    Args:
        x: [fine, ...] float32 or 16 bits. Dead rows are never read.
        route: where the rows of the fine level lie.
        op: `"sum"`, `"mean"`, `"max"`, `"min"` or `"logsumexp"`.
        dtype: of the result.

    Returns:
        [coarse, ...], contiguous; the op's identity for empty segments, zero in dead rows.
    """
    fine, coarse, width = route.fine_rows, route.coarse_rows, math.prod(x.shape[1:])
    out = x.new_empty((coarse, *x.shape[1:]), dtype=dtype)
    if coarse == 0 or width == 0:
        return out
    tile = segment_tile(width, x.element_size())
    x = flat_rows(x, width)
    align = alignment(x.stride(0))
    # No segment is longer than what is allocated: without long ones their programs are left out.
    slots = ceil_div(fine, tile.short) if fine > tile.short else 0
    programs = min(slots, PROGRAMS)
    grid = (programs + ceil_div(coarse, tile.segments), ceil_div(width, tile.columns))
    planes = 2 if op == "logsumexp" else 1
    partial = partial_results(x, planes, tile)
    with guard(x):
        launch(
            reduce_kernel, grid,
            x, out, partial, route.index, route.offsets, route.order, route.live_coarse,
            coarse, slots, programs, x.stride(0) // align,
            X_ALIGN=align, OP=op, PLANES=planes, WIDTH=width, S=tile.segments, R=tile.rows,
            C=tile.columns, T=tile.short, P=tile.piece, num_warps=tile.num_warps,
        )  # fmt: skip
        combine(op, out, partial, route, tile)
    return out


def partial_results(x: Tensor, planes: int, tile: SegmentTile) -> Tensor:
    """Room for what is kept of each piece; no slot where no segment can have several pieces."""
    rows, width = x.shape
    slots = ceil_div(rows, tile.short) if rows > tile.piece else 0
    return x.new_empty((planes, slots, width), dtype=torch.float32)


def combine(op: str, out: Tensor | None, partial: Tensor, route: Route, tile: SegmentTile) -> None:
    """Combines the pieces of each segment of several: into `out`, or in place without it."""
    planes, slots, width = partial.shape
    candidates = ceil_div(route.fine_rows, tile.piece)
    launch(
        combine_kernel,
        (min(candidates, PROGRAMS), ceil_div(width, tile.columns)),
        out, partial, route.index, route.offsets, route.order, route.live_coarse,
        route.coarse_rows, slots, candidates,
        when=slots > 0, OP=op, PLANES=planes, WIDTH=width, R=tile.step_rows, C=tile.columns,
        T=tile.short, P=tile.piece, num_warps=tile.num_warps,
    )  # fmt: skip


def segment_sum(x: Tensor, route: Route, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum over each segment: `kernels.common.segments.segment_sum` for Triton modules.

    Args:
        x: [fine, ...] float32 or 16 bits. Dead rows are never read.
        route: where the rows of the fine level lie.
        dtype: of the result; sums are taken in float32 and rounded once.

    Returns:
        [coarse, ...]; empty segments and dead rows are zero.
    """
    return reduce_segments(x, route, "sum", dtype)
