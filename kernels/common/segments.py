"""Rows moved along a route: gathered to the fine level, summed to the coarse one.

The two are each other's adjoint, and both have derivatives of any order. Sums run in a fixed order
(contract 8) and never as a difference of prefix sums, so that a NaN stays in its segment
(contract 3). Nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route, zero_dead_rows

CHUNK_ROWS = 512
"""Longer segments are summed in pieces of at most this many rows, then the pieces: the rounding
error grows with a piece's length and not the segment's, and one long segment is still summed by
many threads. Segments up to `4 * CHUNK_ROWS` are left whole on a CPU, where cutting costs more
than it gives."""


def gather_rows(x: Tensor, route: Route) -> Tensor:
    """Each fine row's coarse row: `out[i] = x[route.index[i]]`.

    Args:
        x: [coarse, ...], any dtype. Dead rows are never read.
        route: where the rows of the fine level lie.

    Returns:
        [fine, ...], contiguous, never a view of `x`; dead rows are zero.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        gathered: Tensor = _Gather.apply(x, route)  # type: ignore[no-untyped-call]
        return gathered
    return _gather(x, route)


def segment_sum(x: Tensor, route: Route, *, accumulate: torch.dtype = torch.float32) -> Tensor:
    """The sum over each segment: `out[c] = sum of x[i] where route.index[i] == c`.

    Args:
        x: [fine, ...]. Dead rows are never read.
        route: where the rows of the fine level lie.
        accumulate: dtype of the sums of 16-bit and float32 `x`. float64 is summed in float64, and
            integers in int64, exactly.

    Returns:
        [coarse, ...] in the dtype of the sums; empty segments and dead rows are zero.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        summed: Tensor = _Sum.apply(x, route, accumulate)  # type: ignore[no-untyped-call]
        return summed
    return _sum(x, route, accumulate)


class _Gather(torch.autograd.Function):
    """`index_select`, whose own backward would add 16-bit gradients in 16 bits, in any order."""

    @staticmethod
    def forward(x: Tensor, route: Route) -> Tensor:
        return _gather(x, route)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.route = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return segment_sum(grad, ctx.route).to(ctx.dtype), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, route: Route, accumulate: torch.dtype) -> Tensor:
        return _sum(x, route, accumulate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.route, _ = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_rows(grad, ctx.route).to(ctx.dtype), None, None


def _gather(x: Tensor, route: Route) -> Tensor:
    fine = route.fine_rows
    if route.coarse_rows == 0 or fine == 0:
        return x.new_zeros((fine, *x.shape[1:]))
    if x.is_cuda or route.live_fine is None:
        # index_select is much faster on one dim than on [rows, 1].
        flat = x.reshape(-1) if x.numel() == x.shape[0] else x
        out = torch.index_select(flat, 0, route.index).view(fine, *x.shape[1:])
        return zero_dead_rows(out, route.live_fine)
    live = int(route.live_fine)
    out = x.new_zeros((fine, *x.shape[1:]))
    torch.index_select(x, 0, route.index[:live], out=out[:live])
    return out


def _sum(x: Tensor, route: Route, accumulate: torch.dtype) -> Tensor:
    if not x.is_floating_point():
        return _integer_sum(x, route)
    rows, width = x.shape[0], math.prod(x.shape[1:])
    dtype = torch.float64 if x.dtype == torch.float64 else accumulate
    if rows == 0 or width == 0 or route.coarse_rows == 0:
        return x.new_zeros((route.coarse_rows, *x.shape[1:]), dtype=dtype)
    flat = x.reshape(rows, width).to(dtype).contiguous()
    out = sum_bags(flat, route.offsets, route.order)
    return out.view(route.coarse_rows, *x.shape[1:])


def sum_bags(x: Tensor, offsets: Tensor, order: Tensor | None) -> Tensor:
    """[segments, width] sums of the rows `order[offsets[c]:offsets[c + 1]]` of `x` [rows, width].

    `embedding_bag` is the one segmented sum in torch that is serial inside a segment on every
    device, reads rows through an order without a copy of them, and waits for nothing.
    """
    if not worth_cutting(offsets, x.shape[0]):
        return _bags(x, order, offsets)
    starts, pieces = cut(offsets, x.shape[0])
    return _bags(_bags(x, order, starts), None, pieces)


def _bags(x: Tensor, order: Tensor | None, starts: Tensor) -> Tensor:
    if order is None:
        order = torch.arange(x.shape[0], dtype=starts.dtype, device=x.device)
    # The last bag takes what lies beyond the last start: dead rows, of no use to anyone.
    return torch.embedding_bag(x, order, starts, False, 0, False, None, False)[0][:-1]


def worth_cutting(offsets: Tensor, rows: int) -> bool:
    """Whether segments are better reduced in pieces; asks for their lengths on a CPU only."""
    if offsets.is_cuda:
        return rows > CHUNK_ROWS
    if rows <= 4 * CHUNK_ROWS:
        return False
    return int((offsets[1:] - offsets[:-1]).max()) > 4 * CHUNK_ROWS


def cut(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Segments cut at the multiples of CHUNK_ROWS.

    Returns:
        Offsets of the pieces, whose number depends on sizes alone, and of each segment's pieces:
        segment c has the pieces `pieces[c]:pieces[c + 1]`. Empty pieces may be among them.
    """
    multiples = torch.arange(0, rows, CHUNK_ROWS, dtype=offsets.dtype, device=offsets.device)
    end = offsets[-1:].clamp(min=rows)
    starts = torch.cat((offsets, multiples, end)).sort().values
    return starts, torch.searchsorted(starts, offsets, out_int32=True)


def _integer_sum(x: Tensor, route: Route) -> Tensor:
    # Integer addition is exact, so the order of atomics can't be seen.
    out = x.new_zeros((route.coarse_rows, *x.shape[1:]), dtype=torch.int64)
    if x.shape[0] == 0 or route.coarse_rows == 0:
        return out
    x = zero_dead_rows(x, route.live_fine)
    return out.index_add_(0, route.index, x.to(torch.int64))
