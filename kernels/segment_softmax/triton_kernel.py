"""The Triton path of `segment_softmax`: see `kernels.common.triton_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_lib import refused
from ikbo_tree.kernels.common.triton_rows import rowwise


def unsupported(device: torch.device, x: Tensor, route: Route) -> str | None:
    """Why it cannot take a call, or None."""
    return refused(device, x.dtype)


def forward(x: Tensor, route: Route) -> Tensor:
    """[fine, ...] softmax of `x` [fine, ...] over each segment."""
    return rowwise("softmax", x, route)


def backward(grad: Tensor, x: Tensor, route: Route) -> Tensor:
    """[fine, ...] gradient of `x`: p (grad - the segment's sum of p grad)."""
    return rowwise("softmax_grad", x, route, grad=grad)
