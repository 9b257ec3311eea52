"""What `segment_softmax` means: exp(x - the segment's logsumexp), both broadcast to the rows."""

from __future__ import annotations

from torch import Tensor

from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.reduce.reference import scatter_extreme, scatter_sum, widened


def forward(x: Tensor, route: Route) -> Tensor:
    """[fine, ...] softmax of `x` [fine, ...] over each segment; differentiable."""
    if route.coarse_rows == 0 or x.numel() == 0:
        return zero_dead_rows(x * 0, route.live_fine)
    wide = zero_dead_rows(widened(x), route.live_fine)
    peak = scatter_extreme(widened(x).detach(), route, "max")
    terms = (wide - peak.masked_fill(peak.isinf(), 0)[route.index]).exp()
    total = scatter_sum(terms, route)
    p = terms / total.masked_fill(total == 0, 1)[route.index]
    return zero_dead_rows(p, route.live_fine).to(x.dtype)


def backward(grad: Tensor, x: Tensor, route: Route) -> Tensor:
    """[fine, ...] gradient of `x`, by torch through `forward`."""
    return gradients(lambda x: forward(x, route), [x], [grad])[0]
