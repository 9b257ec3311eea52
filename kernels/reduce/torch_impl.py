"""The plain PyTorch path of `reduce`: segmented, nothing wider than `x` is made for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_tree.kernels.common.extremes import segment_extreme
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.segments import gather_rows, segment_sum
from ikbo_tree.kernels.reduce.op import over_count


def forward(x: Tensor, route: Route, op: str) -> Tensor:
    """[coarse, ...] reduction of `x` [fine, ...]."""
    if op == "sum":
        total = segment_sum(x, route)
        return total.to(x.dtype) if x.is_floating_point() else total
    if op == "mean":
        return over_count(segment_sum(x, route), route.offsets).to(x.dtype)
    if op == "logsumexp":
        peak, _, total = exponentials(x, route)
        return zero_dead_rows((total.log() + peak).to(x.dtype), route.live_coarse)
    return zero_dead_rows(segment_extreme(x, route, op), route.live_coarse)


def backward(grad: Tensor, x: Tensor, out: Tensor, route: Route, op: str) -> Tensor:
    """[fine, ...] gradient of `x`, for max, min and logsumexp."""
    if op == "logsumexp":
        _, terms, total = exponentials(x, route)
        share = grad.to(terms.dtype) / total.masked_fill(total == 0, 1)
        dx = terms.mul_(gather_rows(share, route)).to(x.dtype)
    else:
        ties = x == gather_rows(out, route)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        share = grad.to(wide) / segment_sum(ties.to(wide), route)
        # 0 / 0 where a segment holds NaN: NaN, as torch.amax gives; and none to empty segments.
        dx = (ties * gather_rows(share, route)).to(x.dtype)
    return zero_dead_rows(dx, route.live_fine)


def exponentials(x: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor]:
    """The largest value of each segment, exp(x - largest) and its sum, in float32 (or float64).

    Where the largest is infinite, 0 takes its place, as in torch.logsumexp: nothing but -inf sums
    to 0, and a +inf makes the sum +inf.

    Returns:
        [coarse, ...], [fine, ...], [coarse, ...].
    """
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    peak = segment_extreme(wide, route, "max")
    peak = peak.masked_fill_(peak.isinf(), 0)
    terms = torch.sub(wide, gather_rows(peak, route)).exp_()
    return peak, terms, segment_sum(terms, route)
