"""The stages of a split linear op in Triton: one launch a stage, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.common.stages_torch import live_or_zero
from ikbo_tree.kernels.common.triton_gemm import MAPS
from ikbo_tree.kernels.common.triton_lib import refused
from ikbo_tree.kernels.common.triton_pieces import split
from ikbo_tree.kernels.common.triton_products import Producers
from ikbo_tree.kernels.common.triton_segments import segment_sum


class Product(Protocol):
    """How an op multiplies; rows in dim 0. Gradients come in pieces: [pieces, rows, ...]."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Shape of the product."""

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        bias: Tensor | None,
        producers: Producers,
        live: Tensor | None,
        final: bool,
    ) -> None:
        """Writes the product, bias and partials to `out`; zero in dead rows where `final`."""

    def input_gradient(
        self, grad: Tensor, weight: Tensor, out: Tensor, live: Tensor | None
    ) -> None:
        """Writes the gradient of x to `out`; `weight` in pieces, too."""

    def weight_gradient(
        self, grad: Tensor, x: Tensor, live: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Gradient of the weight, summed over rows; `x` in pieces, too."""


def unsupported(device: torch.device, x: Sequence[Tensor]) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    return refused(device, x[0].dtype)


def forward(
    product: Product,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Tensor | None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """Runs all stages; arguments and result as `stages_torch.forward`."""
    last = len(x) - 1
    partials: dict[int, Tensor] = {}
    for stage, (value, w) in enumerate(zip(x, weight, strict=True)):
        final = stage == last
        dtype = value.dtype if final else partial_dtype or torch.float32
        out = value.new_empty(product.out_shape(value, w), dtype=dtype)
        producers: Producers = [
            (partials.pop(p), stages.index[p]) for p in stages.producers(stage) if p in partials
        ]
        if final or producers or value.shape[1] > 0:
            added, live = bias if final else None, stages.live_of(stage)
            while len(producers) > len(MAPS):
                producers = _collected(product, value, w, producers, live)
            product.multiply(value, w, out, added, producers, live, final)
            partials[stage] = out
    return out


def _collected(
    product: Product, x: Tensor, weight: Tensor, producers: Producers, live: Tensor | None
) -> Producers:
    """As many producers as a kernel adds at a time made one, with a row for each row of `x`."""
    x, weight = x[:, :0], weight[:, :0]
    out = x.new_empty(product.out_shape(x, weight), dtype=torch.float32)
    product.multiply(x, weight, out, None, producers[: len(MAPS)], live, False)
    return [(out, None), *producers[len(MAPS) :]]


def backward(
    product: Product,
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for; arguments and result as `stages_torch.backward`."""
    n = len(x)
    wants_x, wants_weight, wants_bias = wants[:n], wants[n : 2 * n], wants[2 * n]
    wanted = [a or b for a, b in zip(wants_x, wants_weight, strict=True)]
    totals = _reduced_gradients(grad, stages, wanted)
    dx, dweight = [], []
    for stage, total in totals.items():
        live = stages.live_of(stage)
        pieces = _pieces(total, grad.dtype) if wanted[stage] else total
        if wants_x[stage]:
            out = x[stage].new_empty(x[stage].shape)
            product.input_gradient(pieces, _factor(weight[stage], pieces), out, live)
            dx.append(out)
        if wants_weight[stage]:
            factor = _factor(x[stage], pieces)
            dweight.append(product.weight_gradient(pieces, factor, live, grad.dtype))
    grads = [*dx, *dweight]
    if wants_bias:
        # The sum over rows is the same at every stage, and cheapest at the coarsest.
        stage, total = next(iter(totals.items()))
        total = live_or_zero(total, stages.live_of(stage))
        grads.append(total.sum(0, dtype=torch.float32).to(grad.dtype))
    return grads


def _reduced_gradients(grad: Tensor, stages: Stages, wanted: Sequence[bool]) -> dict[int, Tensor]:
    """The gradient of the result of every stage that needs it, coarse first; the last always."""
    needed = list(wanted)
    for stage, consumer in enumerate(stages.consumer):
        needed[consumer] |= needed[stage]
    last = len(needed) - 1
    totals = {last: grad}
    for stage in reversed(range(last)):
        if needed[stage]:
            totals[stage] = segment_sum(totals[stages.consumer[stage]], stages.route(stage))
    return dict(sorted(totals.items()))


def _pieces(total: Tensor, dtype: torch.dtype) -> Tensor:
    """[pieces, rows, ...]: a float32 sum of 16-bit gradients has two 16-bit pieces."""
    return total[None] if total.dtype == dtype else split(total)


def _factor(value: Tensor, pieces: Tensor) -> Tensor:
    """[pieces, ...], in the dtype of the gradient's `pieces`, exactly."""
    return value[None] if value.dtype == pieces.dtype else split(value)
