"""The plain PyTorch path of `modulate`: gathered copies become results, and none is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.segments import gather_rows, segment_sum
from ikbo_tree.kernels.common.stages import accumulator


def forward(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, route: Route, dtype: torch.dtype
) -> Tensor:
    """[fine, ...] in `dtype`."""
    given = [y for y in (scale, shift) if y is not None]
    # Torch itself computes one operation of two operands wide, and rounds once.
    wide = dtype if len(given) == 1 and given[0].dtype == x.dtype == dtype else accumulator(dtype)
    gathered = [gather_rows(y.to(wide), route) for y in given]
    out = gathered[-1]
    if len(given) == 2 and x.dtype == wide:
        out = out.addcmul_(gathered[0], x)
    elif len(given) == 2:
        out = out.add_(gathered[0].mul_(x))
    else:
        out = out.add_(x) if scale is None else out.mul_(x)
    return zero_dead_rows(out.to(dtype), route.live_fine)


def backward(
    grad: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    route: Route,
    dtypes: Sequence[torch.dtype],
    wants: Sequence[bool],
) -> list[Tensor]:
    """The wanted gradients of x, scale and shift."""
    found, wide = [], accumulator(grad.dtype)
    if wants[0]:
        assert scale is not None
        dx = gather_rows(scale.to(wide), route).mul_(grad).to(dtypes[0])
        found.append(zero_dead_rows(dx, route.live_fine))
    if wants[1]:
        assert x is not None
        found.append(segment_sum(grad.to(wide) * x, route).to(dtypes[1]))
    if wants[2]:
        found.append(segment_sum(grad, route).to(dtypes[2]))
    return found
