"""The Triton path of `reduce`: see `kernels.common.triton_segments`."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.triton_lib import refused
from ikbo_tree.kernels.common.triton_rows import rowwise
from ikbo_tree.kernels.common.triton_segments import reduce_segments


def unsupported(device: torch.device, x: Tensor, route: Route, op: str) -> str | None:
    """Why it cannot take a call, or None."""
    return refused(device, x.dtype)


def forward(x: Tensor, route: Route, op: str) -> Tensor:
    """[coarse, ...] reduction of `x` [fine, ...]."""
    return reduce_segments(x, route, op, x.dtype)


def backward(grad: Tensor, x: Tensor, out: Tensor, route: Route, op: str) -> Tensor:
    """[fine, ...] gradient of `x`, for max, min and logsumexp."""
    share = grad.contiguous()
    if op == "logsumexp":
        return rowwise("logsumexp_grad", x, route, share=share)
    return rowwise("ties", x, route, extreme=out.contiguous(), share=share)
