"""`ikbo_tree::segment_softmax`: softmax over the rows of each segment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import Route

IMPLEMENTATIONS = dispatch.Implementations(
    "segment_softmax",
    __package__,
    {"reference": "reference", "torch": "torch_impl", "triton": "triton_kernel"},
    {"cuda": ("triton", "torch"), "default": ("torch",)},
)

_MAPS = "Tensor index, Tensor offsets, Tensor? order, Tensor? live_fine, Tensor? live_coarse"


def _forward(
    x: Tensor,
    index: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    live_fine: Tensor | None,
    live_coarse: Tensor | None,
    impl: str,
) -> Tensor:
    route = Route(index, offsets, order, live_fine, live_coarse)
    module = IMPLEMENTATIONS.choose(impl, x.device, x, route)
    out: Tensor = module.forward(x, route)
    return out


def _backward_forward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    live_fine: Tensor | None,
    live_coarse: Tensor | None,
    impl: str,
) -> Tensor:
    route = Route(index, offsets, order, live_fine, live_coarse)
    module = IMPLEMENTATIONS.choose(impl, x.device, x, route)
    dx: Tensor = module.backward(grad, x, route)
    return dx


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


segment_softmax_backward = register(
    "segment_softmax_backward",
    f"(Tensor grad, Tensor x, {_MAPS}, str impl) -> Tensor",
    _backward_forward,
    _fake,
)
"""The gradient of `x`, from `x` and not from the output: that may be rounded to 16 bits."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, impl = inputs
    ctx.save_for_backward(*tensors)
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = segment_softmax_backward(grad, *ctx.saved_tensors, ctx.impl)
    return dx, None, None, None, None, None, None


segment_softmax = register(
    "segment_softmax",
    f"(Tensor x, {_MAPS}, str impl) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(x [fine, ...], *route, impl) -> [fine, ...]`, contiguous, `x`'s dtype; dead rows are zero."""
