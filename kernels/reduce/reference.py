"""What `reduce` means, by scattering each row to its coarse row; by another road than `torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.extremes import identity
from ikbo_tree.kernels.common.routes import Route, live_mask, zero_dead_rows


def forward(x: Tensor, route: Route, op: str) -> Tensor:
    """[coarse, ...] reduction of `x` [fine, ...]; differentiable."""
    if op in ("max", "min"):
        out = scatter_extreme(x, route, op)
    elif op == "logsumexp":
        out = logsumexp(widened(x), route)
    else:
        out = scatter_sum(widened(x), route)
        if op == "mean":
            count = (route.offsets[1:] - route.offsets[:-1]).clamp(min=1)
            out = out / count.view(-1, *[1] * (x.dim() - 1)).to(out.dtype)
    dtype = torch.int64 if op == "sum" and not x.is_floating_point() else x.dtype
    return zero_dead_rows(out.to(dtype), route.live_coarse)


def backward(grad: Tensor, x: Tensor, out: Tensor, route: Route, op: str) -> Tensor:
    """[fine, ...] gradient of `x`, by torch through `forward`."""
    return gradients(lambda x: forward(x, route, op), [x], [grad])[0]


def widened(x: Tensor) -> Tensor:
    """In the dtype that sums are taken in: float32, float64, int64."""
    if not x.is_floating_point():
        return x.to(torch.int64)
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def scatter_sum(x: Tensor, route: Route) -> Tensor:
    """[coarse, ...] sums of `x` [fine, ...], one row after another."""
    x = zero_dead_rows(x, route.live_fine)
    out = x.new_zeros((route.coarse_rows, *x.shape[1:]))
    if route.coarse_rows == 0 or x.numel() == 0:
        return out + x.sum() if x.requires_grad else out
    if x.is_cuda:  # index_add takes CUDA's atomics, in any order; index_put sorts
        return out.index_put((route.index,), x, accumulate=True)
    return out.index_add(0, route.index, x)


def scatter_extreme(x: Tensor, route: Route, op: str) -> Tensor:
    """[coarse, ...] largest or smallest values of `x` [fine, ...]."""
    nothing = identity(x.dtype, op)
    mask = live_mask(x.shape[0], route.live_fine, x)
    if mask is not None:
        x = x.masked_fill(~mask, nothing)
    out = x.new_full((route.coarse_rows, *x.shape[1:]), nothing)
    if route.coarse_rows == 0 or x.numel() == 0:
        return out + x.sum() if x.requires_grad else out
    index = route.index.to(torch.int64).view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    extreme = out.scatter_reduce(0, index, x, "a" + op, include_self=False)
    # Every dead row points at row 0, which may have no live ones.
    return extreme if mask is None else _refill(extreme, route, nothing)


def _refill(x: Tensor, route: Route, nothing: Any) -> Tensor:
    empty = route.offsets[1:] == route.offsets[:-1]
    return x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), nothing)


def logsumexp(x: Tensor, route: Route) -> Tensor:
    """[coarse, ...] log of the sums of exp(x); -inf, and no gradient, where there is nothing."""
    x = zero_dead_rows(x, route.live_fine)
    peak = scatter_extreme(x.detach(), route, "max")
    peak = peak.masked_fill(peak.isinf(), 0)
    if route.coarse_rows == 0 or x.numel() == 0:
        return scatter_extreme(x, route, "max")
    total = scatter_sum((x - peak[route.index]).exp(), route)
    nothing = total == 0
    return (total.masked_fill(nothing, 1).log() + peak).masked_fill(nothing, float("-inf"))
