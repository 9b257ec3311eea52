"""`ikbo_tree::self_target_attention`: a history's own queries and queries below it, over one K/V.

One call, so that the gradients of the shared keys and values are summed before they are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.op import lse_dtype

IMPLEMENTATIONS = dispatch.Implementations(
    "self_target_attention",
    __package__,
    {
        "reference": "reference",
        "torch": "torch_impl",
        "triton": "triton_kernel",
        "gluon": "gluon_sm90",
    },
    {"cuda": ("gluon", "triton", "torch"), "default": ("torch",)},
)

_ARGUMENTS = (
    "Tensor q_self, Tensor q, Tensor k, Tensor v, Tensor? extent, Tensor? index, Tensor? offsets,"
    " Tensor? order, Tensor? live, Tensor? live_of, bool causal, float scale"
)


def _memory(k: Tensor, v: Tensor, extent: Tensor | None, *route: Tensor | None) -> Memory:
    index, offsets, order = route
    return Memory(k, v, extent=extent, index=index, offsets=offsets, order=order)


def _forward(q_self: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *memory, live, live_of, causal, scale, impl = rest
    call = (q_self, q, _memory(*memory), live, live_of, causal, scale)
    module = IMPLEMENTATIONS.choose(impl, q.device, *call)
    o_self, o, lse_self, lse = module.forward(*call)
    return o_self, o, lse_self, lse


def _fake(q_self: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    outputs = [x.new_empty((*x.shape[:-1], v.shape[-1])) for x in (q_self, q)]
    return *outputs, *(x.new_empty(x.shape[:-1], dtype=lse_dtype(x.dtype)) for x in (q_self, q))


def _backward_forward(
    grad_o_self: Tensor | None,
    grad_o: Tensor | None,
    grad_lse_self: Tensor | None,
    grad_lse: Tensor | None,
    results: list[Tensor],
    q_self: Tensor,
    q: Tensor,
    *rest: Any,
) -> list[Tensor]:
    *memory, live, live_of, causal, scale, needs, impl = rest
    grads = (grad_o_self, grad_o, grad_lse_self, grad_lse)
    call = (q_self, q, _memory(*memory), live, live_of, causal, scale)
    module = IMPLEMENTATIONS.choose(impl, q.device, *call)
    gradients: list[Tensor] = module.backward(grads, results, *call, needs)
    return gradients


def _backward_fake(*args: Any) -> list[Tensor]:
    *_, needs, _ = args
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip(args[5:9], needs, strict=True)
        if needed
    ]


self_target_attention_backward = register(
    "self_target_attention_backward",
    "(Tensor? grad_o_self, Tensor? grad_o, Tensor? grad_lse_self, Tensor? grad_lse,"
    f" Tensor[] results, {_ARGUMENTS}, bool[] needs, str impl) -> Tensor[]",
    _backward_forward,
    _backward_fake,
)
"""Gradients of those of q_self, q, k, v that `needs` has a true for; no derivative of its own."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.scale, impl = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # activation checkpointing computes anew at each look
    results, tensors = saved[:4], saved[4:]
    needs = list(ctx.needs_input_grad[:4])
    found = iter(
        self_target_attention_backward(
            *grads, list(results), *tensors, ctx.causal, ctx.scale, needs, ctx.impl
        )
    )
    return *(next(found) if needed else None for needed in needs), *[None] * 9


self_target_attention = register(
    "self_target_attention",
    f"({_ARGUMENTS}, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(q_self [rows_of, S, H, D] or [total, H, D], q [rows, n_seed, H, D], k, v, extent, route, live,
live_of, causal, scale, impl) -> (o_self, o, lse_self, lse)`. Outputs as the queries; rows of
`q_self` that are no key's give zeros and a log-sum-exp of 0, like dead rows."""
