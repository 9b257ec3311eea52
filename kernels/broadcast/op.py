"""`ikbo_tree::broadcast`: rows of a coarse level copied to the rows of a finer one below them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import Route

IMPLEMENTATIONS = dispatch.Implementations(
    "broadcast",
    __package__,
    {"reference": "reference", "torch": "torch_impl", "triton": "triton_kernel"},
    {"cuda": ("triton", "torch"), "default": ("torch",)},
)


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


def _fake(x: Tensor, index: Tensor, *maps: Any) -> Tensor:
    return x.new_empty((index.shape[0], *x.shape[1:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *maps, impl = inputs
    ctx.save_for_backward(*maps)
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Its adjoint is an op with a derivative too, so broadcasts differentiate any number of times.
    dx = torch.ops.ikbo_tree.reduce(grad, *ctx.saved_tensors, "sum", ctx.impl)
    return dx, None, None, None, None, None, None


broadcast = register(
    "broadcast",
    "(Tensor x, Tensor index, Tensor offsets, Tensor? order, Tensor? live_fine,"
    " Tensor? live_coarse, str impl) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(x [coarse, ...], *route, impl) -> [fine, ...]`, contiguous, any dtype; dead rows are zero."""
