"""What `level_norm` means: parts broadcast and put side by side, then the norm's formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ikbo_tree.kernels.broadcast.reference import forward as broadcast
from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import live_mask, zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.level_norm.op import Concatenation


def forward(call: Concatenation) -> Tensor:
    """[rows, K] in the parts' dtype; differentiable."""
    dtype = call.x[0].dtype
    wide = accumulator(dtype)
    x = torch.cat(
        [
            zero_dead_rows(part.to(wide), call.live)
            if route is None
            else broadcast(part.to(wide), route)
            for part, route in zip(call.x, call.routes, strict=True)
        ],
        dim=1,
    )
    if call.centred:
        x = x - x.mean(1, keepdim=True)
    variance = x.square().mean(1, keepdim=True) + call.eps
    mask = live_mask(call.rows, call.live, x)
    if mask is not None:
        # Theirs may be 0, whose root has no finite derivative.
        variance = variance.masked_fill(~mask, 1)
    out = x * variance.rsqrt()
    if call.weight is not None:
        out = out * call.weight.to(wide)
    if call.bias is not None:
        out = out + call.bias.to(wide)
    return zero_dead_rows(out.to(dtype), call.live)


def backward(grad: Tensor, call: Concatenation, wants: Sequence[bool]) -> list[Tensor]:
    """The wanted gradients of each x, the weight and the bias, by torch through `forward`."""
    wide, n = accumulator(grad.dtype), len(call.x)
    ones = grad.new_ones(grad.shape[1], dtype=wide)
    weight = ones if call.weight is None else call.weight.to(wide)

    def function(*given: Tensor) -> Tensor:
        return forward(replace(call, x=given[:n], weight=given[n], bias=given[n + 1]))

    inputs = [*(part.to(wide) for part in call.x), weight, torch.zeros_like(ones)]
    found = gradients(function, inputs, [grad.to(wide)])
    return [dx.to(grad.dtype) for dx, want in zip(found, wants, strict=True) if want]
