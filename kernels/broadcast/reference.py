"""What `broadcast` means: indexing by each fine row's coarse row."""

from __future__ import annotations

from torch import Tensor

from ikbo_tree.kernels.common.routes import Route, zero_dead_rows


def forward(x: Tensor, route: Route) -> Tensor:
    """[fine, ...] rows of `x` [coarse, ...]."""
    if route.coarse_rows == 0:
        return x.new_zeros((route.fine_rows, *x.shape[1:]))
    return zero_dead_rows(x[route.index], route.live_fine)
