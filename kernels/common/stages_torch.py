"""The stages of a split linear op in plain PyTorch, forward and backward, by hand.

On a CPU the finest level's result is written once by a gather of the coarse partials and then added
to by the GEMM itself (beta = 1), chosen by measurement: a separate addition costs 2 % of the time
with 512 columns and 8 % with 64, where memory counts; cutting rows into cache-sized chunks costs
the GEMMs more than it saves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.segments import segment_sum
from ikbo_tree.kernels.common.stages import Stages, accumulator

_HALF = (torch.float16, torch.bfloat16)


class Product(Protocol):
    """How an op multiplies, rows in dim 0. Sums are taken in the accumulator's dtype."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Shape of the product."""

    def add(self, out: Tensor, x: Tensor, weight: Tensor, beta: int) -> None:
        """`out = beta * out + product`, in place; whatever `out` held does not matter at beta 0."""

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Gradient of x, rounded at most once."""

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Gradient of the weight, summed over rows, rounded at most once."""


def operands(a: Tensor, b: Tensor, *, rounds: bool = False) -> tuple[Tensor, Tensor]:
    """Two factors as the device's GEMM should get them: as they are, or widened.

    Args:
        a: one.
        b: the other.
        rounds: the product may come in their own dtype, rounded from float32; else it is wide.
    """
    if a.dtype == b.dtype and (_multiplies_wide(a) or (rounds and _multiplies_fast(a))):
        return a, b
    return cast(a, accumulator(a.dtype)), cast(b, accumulator(b.dtype))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, or of batches of them, summed wide and rounded at most once."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    a, b = operands(a, b, rounds=True)
    return multiply(a, b, out_dtype=torch.float32) if _multiplies_wide(a) else multiply(a, b)


def _multiplies_wide(x: Tensor) -> bool:
    """Whether GEMMs of such 16-bit operands can give float32 results."""
    return x.is_cuda and torch.version.hip is None and x.dtype in _HALF


def _multiplies_fast(x: Tensor) -> bool:
    """Whether GEMMs of such 16-bit operands are faster than float32's.

    On a CPU oneDNN's for bfloat16 are, twice; all others take 5 times as long as float32's.
    """
    return x.dtype in _HALF and (x.is_cuda or (x.dtype == torch.bfloat16 and _has_onednn()))


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, whose call alone costs most of a microsecond where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def forward(
    product: Product,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Tensor | None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """Runs all stages.

    Args:
        product: the op's multiplication.
        x: input of each stage [rows, ...], all of one dtype.
        weight: weight of each stage.
        bias: added to every row of the result.
        stages: how they hang together.
        partial_dtype: what partial results are rounded to; None keeps the accumulator's.

    Returns:
        The last stage's result in the dtype of `x`; dead rows are zero.
    """
    last = len(x) - 1
    dtype = _result_dtype(x[0], partial_dtype)
    partials: dict[int, Tensor] = {}
    for stage, (value, w) in enumerate(zip(x, weight, strict=True)):
        live = stages.live_of(stage)
        out = value.new_empty(product.out_shape(value, w), dtype=dtype)
        target, value = live_part(out, live), live_part(value, live)
        producers = [(partials.pop(p), stages.index[p]) for p in stages.producers(stage)]
        # Each row of the result has one row in each stage, so the first may add the bias for all.
        filled = _fill(target, producers, bias if stage == 0 else None)
        product.add(target, value, w, int(filled))
        if stage < last:
            partials[stage] = out if partial_dtype is None else cast(out, partial_dtype)
    if target is not out:
        out[target.shape[0] :].zero_()
        return cast(out, x[0].dtype)
    return zero_dead_rows(cast(out, x[0].dtype), live)


def _result_dtype(x: Tensor, partial_dtype: torch.dtype | None) -> torch.dtype:
    """What a stage's sums are rounded to: the accumulator's dtype, unless partials are narrower.

    Then a 16-bit GEMM may read them, add in float32 and round once.
    """
    if partial_dtype == x.dtype and _multiplies_fast(x):
        return x.dtype
    return accumulator(x.dtype)


def _fill(out: Tensor, producers: list[tuple[Tensor, Tensor]], bias: Tensor | None) -> bool:
    """Writes the sum of each row's partials and the bias to `out`; False where there are none."""
    filled = bias is not None
    if bias is not None:
        out.copy_(bias.expand_as(out))
    for partial, index in producers:
        if partial.shape[0] == 0:  # then no row is live; on a device, dead ones point at row 0
            continue
        if out.shape[0] < index.shape[0]:
            index = index[: out.shape[0]]
        if filled:
            out.add_(partial.index_select(0, index))
        elif partial.dtype == out.dtype:
            torch.index_select(partial, 0, index, out=out)
        else:
            out.copy_(partial.index_select(0, index))
        filled = True
    return filled


def backward(
    product: Product,
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for.

    Args:
        product: the op's multiplication.
        grad: gradient of the result, any strides.
        x: input of each stage.
        weight: weight of each stage.
        stages: how they hang together.
        wants: one bool for each x, each weight and the bias.

    Returns:
        Gradients in that order, in the dtype of `grad`; dead rows of those of `x` are zero.
    """
    n = len(x)
    wants_x, wants_weight, wants_bias = wants[:n], wants[n : 2 * n], wants[2 * n]
    wanted = [a or b for a, b in zip(wants_x, wants_weight, strict=True)]
    totals = _reduced_gradients(grad, stages, wanted)
    dx, dweight = [], []
    for stage, total in totals.items():
        live = stages.live_of(stage)
        if wants_x[stage]:
            part = product.input_gradient(live_part(total, live), weight[stage])
            dx.append(_padded(cast(part, grad.dtype), total.shape[0], live))
        if wants_weight[stage]:
            part = product.weight_gradient(live_or_zero(total, live), live_or_zero(x[stage], live))
            dweight.append(cast(part, grad.dtype))
    grads = [*dx, *dweight]
    if wants_bias:
        # The sum over rows is the same at every stage, and cheapest at the coarsest.
        stage, total = next(iter(totals.items()))
        total = live_or_zero(total, stages.live_of(stage))
        grads.append(cast(total.sum(0, dtype=accumulator(total.dtype)), grad.dtype))
    return [g.contiguous() for g in grads]


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


def live_part(x: Tensor, live: Tensor | None) -> Tensor:
    """The live rows where the host sees their count without waiting, else all of `x`."""
    if live is None or x.device.type != "cpu":
        return x
    return x[: int(live)]


def live_or_zero(x: Tensor, live: Tensor | None) -> Tensor:
    """For sums over rows: `live_part`, with zeros in what dead rows it has."""
    return live_part(x, live) if x.device.type == "cpu" else zero_dead_rows(x, live)


def _padded(part: Tensor, rows: int, live: Tensor | None) -> Tensor:
    """`part` with zeros in its dead rows, and as many more as are missing to `rows`."""
    if part.shape[0] < rows:
        out = part.new_zeros((rows, *part.shape[1:]))
        out[: part.shape[0]] = part
        return out
    return zero_dead_rows(part, live)
