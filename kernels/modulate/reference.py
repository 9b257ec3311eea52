"""What `modulate` means: both coarse operands broadcast, then a product and a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.broadcast.reference import forward as broadcast
from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator


def forward(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, route: Route, dtype: torch.dtype
) -> Tensor:
    """[fine, ...] in `dtype`; differentiable."""
    out = x.to(accumulator(x.dtype))
    if scale is not None:
        out = out * broadcast(scale.to(out.dtype), route)
    if shift is not None:
        out = out + broadcast(shift.to(out.dtype), route)
    return zero_dead_rows(out.to(dtype), route.live_fine)


def backward(
    grad: Tensor,
    x: Tensor | None,
    scale: Tensor | None,
    route: Route,
    dtypes: Sequence[torch.dtype],
    wants: Sequence[bool],
) -> list[Tensor]:
    """The wanted gradients of x, scale and shift, by torch through `forward`."""
    coarse = route.coarse_rows, *grad.shape[1:]
    wide = accumulator(grad.dtype)
    values = [grad.new_zeros(grad.shape) if x is None else x, scale, grad.new_zeros(coarse)]
    operands = [None if value is None else value.to(wide) for value in values]
    wanted = [k for k, want in enumerate(wants) if want]

    def function(*given: Tensor) -> Tensor:
        named = dict(zip(wanted, given, strict=True))
        x, scale, shift = (named.get(k, operands[k]) for k in range(3))
        assert x is not None
        return forward(x, scale, shift, route, wide)

    inputs = [operands[k] for k in wanted]
    found = gradients(function, [value for value in inputs if value is not None], [grad.to(wide)])
    return [dx.to(dtypes[k]) for k, dx in zip(wanted, found, strict=True)]
