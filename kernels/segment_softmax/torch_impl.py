"""The plain PyTorch path of `segment_softmax`."""

from __future__ import annotations

from torch import Tensor

from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.segments import gather_rows, segment_sum
from ikbo_tree.kernels.reduce.torch_impl import exponentials


def forward(x: Tensor, route: Route) -> Tensor:
    """[fine, ...] softmax of `x` [fine, ...] over each segment."""
    return zero_dead_rows(_softmax(x, route).to(x.dtype), route.live_fine)


def backward(grad: Tensor, x: Tensor, route: Route) -> Tensor:
    """[fine, ...] gradient of `x`: p (grad - the segment's sum of p grad)."""
    p = _softmax(x, route)
    wide = grad.to(p.dtype)
    dot = gather_rows(segment_sum(p * wide, route), route)
    return zero_dead_rows(p.mul_(wide - dot).to(x.dtype), route.live_fine)


def _softmax(x: Tensor, route: Route) -> Tensor:
    """In float32 (or float64); zero where a segment holds nothing but -inf."""
    _, terms, total = exponentials(x, route)
    return terms.div_(gather_rows(total.masked_fill_(total == 0, 1), route))
