"""`ikbo_tree::silu_attention`: attention by `silu` of each score, summed over shared keys.

    o[i] = factor factors[i] (sum over keys j that row i attends to, in all memories, of
                              silu(scale q[i] . k[j] + bias[j]) v[j])

Keys and values stay at their own level; see `kernels.target_attention.memories` for their layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.target_attention.memories import collect

IMPLEMENTATIONS = dispatch.Implementations(
    "silu_attention",
    __package__,
    {"reference": "reference", "torch": "torch_impl", "triton": "triton_kernel"},
    {"default": ("torch",)},
)


class Factors(NamedTuple):
    """What the sums of each query row are multiplied by.

    Attributes:
        each: [rows] in the accumulator's dtype, anything in dead rows; None: 1.
        all: of all rows.
    """

    each: Tensor | None
    all: float

    def times(self, x: Tensor, live: Tensor | None) -> Tensor:
        """`x` [rows, ...] in the accumulator's dtype, multiplied; dead rows are zero."""
        if self.each is not None:
            x = x * self.each.view(-1, *[1] * (x.dim() - 1))
        return zero_dead_rows(x * self.all, live)


_ARGUMENTS = (
    "Tensor q, Tensor[] k, Tensor[] v, Tensor[] bias, int[] bias_of, Tensor?[] extent,"
    " Tensor?[] mask, Tensor?[] index, Tensor?[] offsets, Tensor?[] order, Tensor? live,"
    " Tensor? factors, float factor, float scale"
)


def _forward(q: Tensor, *rest: Any) -> Tensor:
    *lists, live, factors, factor, scale, impl = rest
    memories = collect(*lists)
    module = IMPLEMENTATIONS.choose(impl, q.device, q, memories)
    o: Tensor = module.forward(q, memories, live, Factors(factors, factor), scale)
    return o


def _fake(q: Tensor, k: list[Tensor], v: list[Tensor], *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v[0].shape[-1]))


def _run_backward(grad: Tensor, q: Tensor, *rest: Any) -> list[Tensor]:
    *lists, live, factors, factor, scale, needs, impl = rest
    memories, over = collect(*lists), Factors(factors, factor)
    module = IMPLEMENTATIONS.choose(impl, q.device, q, memories)
    found: list[Tensor] = module.backward(grad, q, memories, live, over, scale, needs)
    return found


def _backward_fake(grad: Tensor, *rest: Any) -> list[Tensor]:
    q, k, v, bias, *_, needs, _ = rest
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip((q, *k, *v, *bias), needs, strict=True)
        if needed
    ]


silu_attention_backward = register(
    "silu_attention_backward",
    f"(Tensor grad, {_ARGUMENTS}, bool[] needs, str impl) -> Tensor[]",
    _run_backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, *lists, live, factors, ctx.factor, ctx.scale, impl = inputs
    ctx.lengths = [len(entries) for entries in lists]
    ctx.bias_of = lists[3]
    ctx.save_for_backward(
        q, live, factors, *(x for i, entries in enumerate(lists) if i != 3 for x in entries)
    )
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, live, factors, *tensors = ctx.saved_tensors
    lists: list[list[Any]] = []
    for i, length in enumerate(ctx.lengths):
        if i == 3:
            lists.append(ctx.bias_of)
            continue
        lists.append(list(tensors[:length]))
        tensors = tensors[length:]
    needs_q, *groups = ctx.needs_input_grad[:4]
    needs = [needs_q, *(needed for group in groups for needed in group)]
    found = iter(
        silu_attention_backward(
            grad, q, *lists, live, factors, ctx.factor, ctx.scale, needs, ctx.impl
        )
    )
    dq = next(found) if needs_q else None
    wanted = [[next(found) if needed else None for needed in group] for group in groups]
    return dq, *wanted, *(_no_gradient(entries) for entries in lists[3:]), *[None] * 5


def _no_gradient(entries: list[Any]) -> list[None] | None:
    # torch.library flattens a list without a None (or an int) in it, and keeps any other whole.
    whole = any(not isinstance(entry, Tensor) for entry in entries)
    return None if whole else [None] * len(entries)


silu_attention = register(
    "silu_attention",
    f"({_ARGUMENTS}, str impl) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(q, *memories, live, factors, factor, scale, impl) -> [rows, n_seed, H, Dv]` in q's dtype: q
[rows, n_seed, H, D], memories as lists of the fields of `Memory`, live [1] int32 or None. Computed
in float32 (float64 for float64), rounded once; dead rows are zero. Differentiable once, by q, k, v
and bias."""
