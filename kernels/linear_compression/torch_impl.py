"""The plain PyTorch path of `linear_compression`: a batch of GEMMs a level, at its batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common import stages_torch
from ikbo_tree.kernels.common.stages import Stages, accumulator
from ikbo_tree.kernels.linear_compression import op

_RUN = 256
"""Rows added to one another in a row before their sum joins the rest: bounds the rounding error."""


class Batches:
    """`weight [M, K] @ x [rows, K, N]`."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """[rows, M, N]."""
        return op.out_shape(x, weight)

    def add(self, out: Tensor, x: Tensor, weight: Tensor, beta: int) -> None:
        """Into `out` [rows, M, N]."""
        if out.dtype != x.dtype:
            weight, x = stages_torch.operands(weight, x)
        weight = weight.expand(x.shape[0], -1, -1)
        if x.dtype == out.dtype:
            out.baddbmm_(weight, x, beta=beta)
        else:
            torch.baddbmm(out, weight, x, out_dtype=out.dtype, beta=beta, out=out)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """[rows, K, N] from `grad` [rows, M, N]."""
        weight, grad = stages_torch.operands(weight, grad, rounds=True)
        return stages_torch.matmul(weight.t().expand(grad.shape[0], -1, -1), grad)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """[M, K] from `grad` [rows, M, N]."""
        if grad.device.type == "cpu":
            return _sum_of_products(grad, x.mT)
        # A device would run rows one after the other: side by side they are one long product.
        long_grad = grad.transpose(0, 1).flatten(1)
        return stages_torch.matmul(long_grad, x.transpose(0, 1).flatten(1).t())


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], the sum over rows of a [rows, M, N] @ b [rows, N, K], without copies of either.

    `addbmm` runs rows one after the other, each with the threads' whole start and end. Products of
    an eighth of their factors' size are rather written out and added: 16 ms become 2 ms for 10,000
    rows of M = 4, N = 32, K = 12, while for M = 64, N = 64, K = 256 it would be 98 for 60.
    """
    wide = accumulator(a.dtype)
    m, n, k = *a.shape[1:], b.shape[2]
    small = 8 * m * k <= (m + k) * n
    out = a.new_zeros((m, k), dtype=wide)
    for start in range(0, a.shape[0], _RUN):
        left, right = (x[start : start + _RUN].to(wide) for x in (a, b))
        out += torch.bmm(left, right).sum(0) if small else torch.addbmm(out, left, right, beta=0)
    return out


_BATCHES = Batches()


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, M, N] of the last stage."""
    return stages_torch.forward(_BATCHES, x, weight, bias, stages, partial_dtype)


def backward(
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for."""
    return stages_torch.backward(_BATCHES, grad, x, weight, stages, wants)
