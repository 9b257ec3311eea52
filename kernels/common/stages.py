"""Linear ops split by level: what a stage is, and the op that runs the stages of a path.

Stage s multiplies its input, at the batch size of its own level, with its weight. Every stage but
the last hands its result to a finer one, so that nothing is ever broadcast before it is multiplied:

    P[s] = x[s] * weight[s] + sum of P[p][index[p]] over the stages p with consumer[p] == s
    out  = P[last] (+ bias)

    user (0) ────── vendor (2) ── item (3)      consumer = [2, 2, 3]
    brand table (1) ───┘

A level whose consumer is the next one makes a chain; a side table is one more producer. Backward
walks the same edges up, from G[last] = grad:

    G[p] = sum of G[consumer[p]] over the segments of p's route
    dx[s] = G[s] * weight[s]      dweight[s] = sum over the rows of G[s] with x[s]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common import dispatch, list_autograd
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import Route


@dataclass(frozen=True, slots=True)
class Stages:
    """How n stages hang together, as plain tensors that a kernel can take.

    Attributes:
        consumer: n - 1 positions, each beyond its own.
        index: n - 1 maps [rows of consumer[s]] int32: the row of stage s of each of them.
        offsets: n - 1 prefix sums [rows of s + 1] int32 of its inverse.
        order: n - 1 orders of its inverse, None where the rows lie in order.
        live: n live counts [1] int32; none at all where every row is live.
    """

    consumer: Sequence[int]
    index: Sequence[Tensor]
    offsets: Sequence[Tensor]
    order: Sequence[Tensor | None]
    live: Sequence[Tensor]

    def live_of(self, stage: int) -> Tensor | None:
        """Live count of a stage's rows; None: all are."""
        return self.live[stage] if self.live else None

    def route(self, stage: int) -> Route:
        """From the rows of the stage's consumer to its own."""
        return Route(
            self.index[stage],
            self.offsets[stage],
            self.order[stage],
            self.live_of(self.consumer[stage]),
            self.live_of(stage),
        )

    def producers(self, stage: int) -> list[int]:
        """The stages that hand their result to this one."""
        return [p for p, c in enumerate(self.consumer) if c == stage]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are summed (contract 2)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_MAPS = "int[] consumer, Tensor[] index, Tensor[] offsets, Tensor?[] order, Tensor[] live"


def define(
    name: str,
    implementations: dispatch.Implementations,
    out_shape: Callable[[Tensor, Tensor], tuple[int, ...]],
    *,
    bias: bool,
) -> Callable[..., Any]:
    """Registers `ikbo_tree::name` and `ikbo_tree::name_backward`; returns the former.

    Its arguments are x, weight, bias (only with `bias`), the fields of `Stages`, partial_dtype and
    impl. Implementations have

        forward(x, weight, bias, stages, partial_dtype) -> out
        backward(grad, x, weight, stages, wants) -> gradients

    where wants has one bool for each x, each weight and the bias, and only the gradients asked for
    come back, in that order, contiguous, in the dtype of x.

    Args:
        name: the op's name.
        implementations: of both directions.
        out_shape: of the result, from the last stage's x and weight.
        bias: whether the op takes a bias.
    """

    def forward(x: list[Tensor], weight: list[Tensor], *rest: Any) -> Tensor:
        added, rest = (rest[0], rest[1:]) if bias else (None, rest)
        stages, (partial_dtype, impl) = Stages(*rest[:5]), rest[5:]
        args = (x, weight, added, stages, partial_dtype)
        out: Tensor = implementations.choose(impl, x[-1].device, *args).forward(*args)
        return out

    def fake(x: list[Tensor], weight: list[Tensor], *rest: Any) -> Tensor:
        return x[-1].new_empty(out_shape(x[-1], weight[-1]))

    def run_backward(
        grad: Tensor, x: list[Tensor], weight: list[Tensor], *rest: Any
    ) -> list[Tensor]:
        stages, (wants, impl) = Stages(*rest[:5]), rest[5:]
        module = implementations.choose(impl, grad.device, x, weight, None, stages, None)
        grads: list[Tensor] = module.backward(grad, x, weight, stages, wants)
        return grads

    backward_op = register(
        f"{name}_backward",
        f"(Tensor grad, Tensor[] x, Tensor[] weight, {_MAPS}, bool[] wants, str impl) -> Tensor[]",
        run_backward,
        _backward_fake,
    )

    def backward(ctx: Any, grad: Tensor, wants: Sequence[bool]) -> list[Tensor | None]:
        found = _backward(ctx, grad, [*wants, *([] if bias else [False])], backward_op)
        return found if bias else found[:-1]

    added = "Tensor? bias, " if bias else ""
    return list_autograd.register(
        name,
        f"(Tensor[] x, Tensor[] weight, {added}{_MAPS}, ScalarType? partial_dtype, str impl)"
        " -> Tensor",
        forward,
        fake,
        leading=3 if bias else 2,
        setup_context=_setup_context,
        backward=backward,
    )


def _backward_fake(grad: Tensor, x: list[Tensor], weight: list[Tensor], *rest: Any) -> list[Tensor]:
    wants = rest[-2]
    shapes = [t.shape for t in (*x, *weight)] + [grad.shape[1:]]
    return [grad.new_empty(shape) for shape, want in zip(shapes, wants, strict=True) if want]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight = inputs[:2]
    ctx.consumer, index, offsets, order, live, _, impl = inputs[-7:]
    ctx.save_for_backward(*x, *weight, *index, *offsets, *order, *live)
    ctx.impl = dispatch.in_force(impl)


def _backward(
    ctx: Any, grad: Tensor, wants: list[bool], backward_op: Callable[..., list[Tensor]]
) -> list[Tensor | None]:
    n = len(ctx.consumer) + 1
    saved = list(ctx.saved_tensors)
    x, weight, maps = saved[:n], saved[n : 2 * n], saved[2 * n :]
    index, offsets, order = (maps[i * (n - 1) : (i + 1) * (n - 1)] for i in range(3))
    live = maps[3 * (n - 1) :]
    found = iter(
        backward_op(grad, x, weight, ctx.consumer, index, offsets, order, live, wants, ctx.impl)
    )
    return [next(found) if want else None for want in wants]
