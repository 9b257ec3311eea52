"""The plain PyTorch path of `linear`: one GEMM a level, at the level's own batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common import stages_torch
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.linear import op


class Matrices:
    """`x [rows, K] @ weight [N, K].T`."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """[rows, N]."""
        return op.out_shape(x, weight)

    def add(self, out: Tensor, x: Tensor, weight: Tensor, beta: int) -> None:
        """Into `out` [rows, N]."""
        if out.dtype != x.dtype:
            x, weight = stages_torch.operands(x, weight)
        if x.dtype == out.dtype:
            out.addmm_(x, weight.t(), beta=beta)
        else:
            torch.addmm(out, x, weight.t(), out_dtype=out.dtype, beta=beta, out=out)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """[rows, K] from `grad` [rows, N]."""
        return stages_torch.matmul(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """[N, K] from `grad` [rows, N]."""
        return stages_torch.matmul(grad.t(), x)


_MATRICES = Matrices()


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Tensor | None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, N] of the last stage."""
    return stages_torch.forward(_MATRICES, x, weight, bias, stages, partial_dtype)


def backward(
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for."""
    return stages_torch.backward(_MATRICES, grad, x, weight, stages, wants)
