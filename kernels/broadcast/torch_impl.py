"""The plain PyTorch path of `broadcast`."""

from __future__ import annotations

from torch import Tensor

from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.segments import gather_rows


def forward(x: Tensor, route: Route) -> Tensor:
    """[fine, ...] rows of `x` [coarse, ...]. Its backward is the op `reduce` with `op="sum"`."""
    return gather_rows(x, route)
