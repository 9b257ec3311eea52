"""`ikbo_tree::reduce`: the rows of a fine level reduced to the coarse rows above them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import Route

IMPLEMENTATIONS = dispatch.Implementations(
    "reduce",
    __package__,
    {"reference": "reference", "torch": "torch_impl", "triton": "triton_kernel"},
    {"cuda": ("triton", "torch"), "default": ("torch",)},
)
OPS = ("sum", "mean", "max", "min", "logsumexp")

_MAPS = "Tensor index, Tensor offsets, Tensor? order, Tensor? live_fine, Tensor? live_coarse"


def _forward(
    x: Tensor,
    index: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    live_fine: Tensor | None,
    live_coarse: Tensor | None,
    op: str,
    impl: str,
) -> Tensor:
    route = Route(index, offsets, order, live_fine, live_coarse)
    module = IMPLEMENTATIONS.choose(impl, x.device, x, route, op)
    out: Tensor = module.forward(x, route, op)
    return out


def _fake(x: Tensor, index: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    op = rest[-2]
    integer_sum = op == "sum" and not x.dtype.is_floating_point
    dtype = torch.int64 if integer_sum else x.dtype
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=dtype)


def _backward_forward(
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    index: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    live_fine: Tensor | None,
    live_coarse: Tensor | None,
    op: str,
    impl: str,
) -> Tensor:
    route = Route(index, offsets, order, live_fine, live_coarse)
    module = IMPLEMENTATIONS.choose(impl, x.device, x, route, op)
    dx: Tensor = module.backward(grad, x, out, route, op)
    return dx


def _backward_fake(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


reduce_backward = register(
    "reduce_backward",
    f"(Tensor grad, Tensor x, Tensor out, {_MAPS}, str op, str impl) -> Tensor",
    _backward_forward,
    _backward_fake,
)
"""The gradient of `x` for max, min and logsumexp; it has no derivative of its own."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *maps, op, impl = inputs
    linear = op in ("sum", "mean")
    ctx.save_for_backward(*maps, *(() if linear else (x, output)))
    ctx.op = op
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # activation checkpointing computes anew at each look
    maps, rest = saved[:5], saved[5:]
    if ctx.op in ("sum", "mean"):
        # Ops with derivatives themselves: sums and means differentiate any number of times.
        if ctx.op == "mean":
            grad = over_count(grad, maps[1])
        dx = torch.ops.ikbo_tree.broadcast(grad, *maps, ctx.impl)
    else:
        dx = reduce_backward(grad, *rest, *maps, ctx.op, ctx.impl)
    return dx, None, None, None, None, None, None, None


def over_count(x: Tensor, offsets: Tensor) -> Tensor:
    """`x` [coarse, ...] over the rows of each segment; over 1 where there are none."""
    count = (offsets[1:] - offsets[:-1]).clamp(min=1).to(x.dtype if _wide(x) else torch.float32)
    return (x / count.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def _wide(x: Tensor) -> bool:
    # A count above 2048 is not a float16, above 256 no bfloat16.
    return x.dtype in (torch.float32, torch.float64)


reduce = register(
    "reduce",
    f"(Tensor x, {_MAPS}, str op, str impl) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(x [fine, ...], *route, op, impl) -> [coarse, ...]`, contiguous, in `x`'s dtype (a sum of
integers: int64); dead rows are zero."""
