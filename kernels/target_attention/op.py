"""`ikbo_tree::target_attention`: queries over the keys and values that all their ancestors own.

Lists have one entry a memory. Biases, which may be absent and have gradients, come as a shorter
list with `bias_of` naming each one's memory: torch.library passes no gradient into a list with a
None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.target_attention.memories import collect

IMPLEMENTATIONS = dispatch.Implementations(
    "target_attention",
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
    "Tensor q, Tensor[] k, Tensor[] v, Tensor[] bias, int[] bias_of, Tensor?[] extent,"
    " Tensor?[] mask, Tensor?[] index, Tensor?[] offsets, Tensor?[] order, Tensor? live,"
    " float scale"
)
_LISTS = 9  # k ... order


def _forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *lists, live, scale, impl = rest
    memories = collect(*lists)
    module = IMPLEMENTATIONS.choose(impl, q.device, q, memories, live, scale)
    o, lse = module.forward(q, memories, live, scale)
    return o, lse


def _fake(q: Tensor, k: list[Tensor], v: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    o = q.new_empty((*q.shape[:-1], v[0].shape[-1]))
    return o, q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp, and of all partial results, for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _backward_forward(
    grad_o: Tensor, grad_lse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor, *rest: Any
) -> list[Tensor]:
    *lists, live, scale, needs, impl = rest
    memories = collect(*lists)
    module = IMPLEMENTATIONS.choose(impl, q.device, q, memories, live, scale)
    gradients: list[Tensor] = module.backward(
        grad_o, grad_lse, o, lse, q, memories, live, scale, needs
    )
    return gradients


def _backward_fake(grad_o: Tensor, grad_lse: Any, o: Any, lse: Any, *rest: Any) -> list[Tensor]:
    q, k, v, bias, *_, needs, _ = rest
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip((q, *k, *v, *bias), needs, strict=True)
        if needed
    ]


target_attention_backward = register(
    "target_attention_backward",
    f"(Tensor grad_o, Tensor? grad_lse, Tensor o, Tensor lse, {_ARGUMENTS}, bool[] needs,"
    " str impl) -> Tensor[]",
    _backward_forward,
    _backward_fake,
)
"""Gradients of those of q, *k, *v, *bias that `needs` has a true for; no derivative of its own."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, *lists, live, scale, impl = inputs
    ctx.set_materialize_grads(False)
    ctx.lengths = [len(entries) for entries in lists]
    ctx.bias_of = lists[3]
    tensors = [x for i, entries in enumerate(lists) if i != 3 for x in entries]
    ctx.save_for_backward(*output, q, live, *tensors)
    ctx.scale = scale
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    o, lse, q, live, *tensors = ctx.saved_tensors
    lists: list[list[Any]] = []
    for i, length in enumerate(ctx.lengths):
        if i == 3:
            lists.append(ctx.bias_of)
            continue
        lists.append(list(tensors[:length]))
        tensors = tensors[length:]
    needs_q, needs_k, needs_v, needs_bias, *_ = ctx.needs_input_grad
    needs = [needs_q, *needs_k, *needs_v, *needs_bias]
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    found = iter(
        target_attention_backward(
            grad_o, grad_lse, o, lse, q, *lists, live, ctx.scale, needs, ctx.impl
        )
    )
    dq = next(found) if needs_q else None
    dk, dv, dbias = (
        [next(found) if needed else None for needed in group]
        for group in (needs_k, needs_v, needs_bias)
    )
    return dq, dk, dv, dbias, *(_no_gradient(entries) for entries in lists[3:]), None, None, None


def _no_gradient(entries: list[Any]) -> list[None] | None:
    # torch.library flattens a list without a None (or an int) in it, and keeps any other whole.
    whole = any(not isinstance(entry, Tensor) for entry in entries)
    return None if whole else [None] * len(entries)


target_attention = register(
    "target_attention",
    f"({_ARGUMENTS}, str impl) -> (Tensor, Tensor)",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(q [rows, n_seed, H, D], lists of memories, live, scale, impl) -> (o, lse)`: o [rows, n_seed, H,
Dv] in q's dtype, lse [rows, n_seed, H] in float32 (float64 for float64), natural logarithm."""
