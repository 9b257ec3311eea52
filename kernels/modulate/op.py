"""`ikbo_tree::modulate`: fine rows times one coarse operand plus another, nothing gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch, list_autograd
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator

IMPLEMENTATIONS = dispatch.Implementations(
    "modulate",
    __package__,
    {"reference": "reference", "torch": "torch_impl", "triton": "triton_kernel"},
    {"default": ("torch",)},
)

_MAPS = (
    "Tensor index, Tensor offsets, Tensor? order, Tensor? live_fine, Tensor? live_coarse,"
    " ScalarType dtype, str impl"
)


def _forward(x: Tensor, scale: Tensor | None, shift: Tensor | None, *rest: Any) -> Tensor:
    *maps, dtype, impl = rest
    module = IMPLEMENTATIONS.choose(impl, x.device, [x, scale, shift])
    out: Tensor = module.forward(x, scale, shift, Route(*maps), dtype)
    return out


def _fake(x: Tensor, scale: Tensor | None, shift: Tensor | None, *rest: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=rest[-2])


def _run_backward(grad: Tensor, x: Tensor | None, scale: Tensor | None, *rest: Any) -> list[Tensor]:
    *maps, dtype, coarse_dtype, wants, impl = rest
    module = IMPLEMENTATIONS.choose(impl, grad.device, [grad, x, scale])
    dtypes = (dtype, coarse_dtype, coarse_dtype)
    found: list[Tensor] = module.backward(grad, x, scale, Route(*maps), dtypes, wants)
    return found


def _backward_fake(
    grad: Tensor, x: Tensor | None, scale: Tensor | None, index: Tensor, offsets: Tensor, *rest: Any
) -> list[Tensor]:
    dtype, coarse_dtype, wants, _ = rest[-4:]
    coarse = offsets.shape[0] - 1, *grad.shape[1:]
    shapes = ((grad.shape, dtype), (coarse, coarse_dtype), (coarse, coarse_dtype))
    return [
        grad.new_empty(shape, dtype=kind)
        for (shape, kind), want in zip(shapes, wants, strict=True)
        if want
    ]


modulate_backward = register(
    "modulate_backward",
    "(Tensor grad, Tensor? x, Tensor? scale, Tensor index, Tensor offsets, Tensor? order,"
    " Tensor? live_fine, Tensor? live_coarse, ScalarType dtype, ScalarType coarse_dtype,"
    " bool[] wants, str impl) -> Tensor[]",
    _run_backward,
    _backward_fake,
)
"""The gradients that `wants` names of x, scale and shift; that of x only where there is a scale."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, shift, *maps, _, impl = inputs
    # A sum's gradients need none of its terms.
    ctx.save_for_backward(*([None, None] if scale is None else [x, scale]), *maps)
    ctx.dtype, ctx.coarse_dtype = x.dtype, (shift if scale is None else scale).dtype
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor, wants: Sequence[bool]) -> list[Tensor | None]:
    x, scale, *maps = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _differentiable(ctx, grad, wants, x, scale, maps)
    found: list[Tensor | None] = [None, None, None]
    wants = list(wants)
    if scale is None and wants[0]:
        found[0], wants[0] = zero_dead_rows(grad, maps[3]).to(ctx.dtype), False
    if any(wants):
        made = modulate_backward(
            grad, x, scale, *maps, ctx.dtype, ctx.coarse_dtype, wants, ctx.impl
        )
        for at, want in enumerate(wants):
            if want:
                found[at] = made.pop(0)
    return found


def _differentiable(
    ctx: Any,
    grad: Tensor,
    wants: Sequence[bool],
    x: Tensor | None,
    scale: Tensor | None,
    maps: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The same of ops that have derivatives, so that all derivatives exist."""
    ops, found = torch.ops.ikbo_tree, list[Tensor | None]([None, None, None])
    grad = zero_dead_rows(grad, maps[3]).to(accumulator(grad.dtype))
    if wants[0]:
        dx = grad if scale is None else grad * ops.broadcast(scale, *maps, ctx.impl)
        found[0] = dx.to(ctx.dtype)
    if wants[1]:
        assert x is not None
        product = zero_dead_rows(grad * x, maps[3])
        found[1] = ops.reduce(product, *maps, "sum", ctx.impl).to(ctx.coarse_dtype)
    if wants[2]:
        found[2] = ops.reduce(grad, *maps, "sum", ctx.impl).to(ctx.coarse_dtype)
    return found


modulate = list_autograd.register(
    "modulate",
    f"(Tensor x, Tensor? scale, Tensor? shift, {_MAPS}) -> Tensor",
    _forward,
    _fake,
    leading=3,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(x [fine, ...], scale, shift [coarse, ...], *route, dtype, impl) -> [fine, ...]` in `dtype`.

    out[i] = x[i] * scale[index[i]] + shift[index[i]]

Without a scale or a shift, but not without both, that part is left out. Trailing dims are the same,
scale and shift have one dtype. Computed in float32 (float64 for float64), rounded once; contiguous;
dead rows are zero. Differentiable any number of times.
"""
