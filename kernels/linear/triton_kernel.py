"""The Triton path of `linear`: one GEMM a level, at the level's own batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common import triton_stages
from ikbo_tree.kernels.common.gemm_forms import architecture
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.common.triton_operands import matrices, weight_matrices
from ikbo_tree.kernels.common.triton_products import Producers, multiply, weight_gradient
from ikbo_tree.kernels.linear import op
from ikbo_tree.kernels.linear.config import choose


class Matrices:
    """`x [rows, K] @ weight [N, K].T`: rows are rows of one product."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """[rows, N]."""
        return op.out_shape(x, weight)

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
        """Into `out` [rows, N]."""
        role = "forward" if final else "partial"
        choice = choose(role, architecture(x.device), x.dtype, out.shape[1])
        described = choice.descriptors and x.numel() > 0
        multiply(
            matrices(x[None, None], descriptors=described),
            weight_matrices(weight, descriptors=described, transposed=True),
            out,
            choice.tile,
            rows_along="m",
            live=live,
            zero_dead=final,
            slots=choice.slots(x.device),
            bias=None if bias is None else bias.contiguous(),
            producers=producers,
        )

    def input_gradient(
        self, grad: Tensor, weight: Tensor, out: Tensor, live: Tensor | None
    ) -> None:
        """[rows, K] from `grad` [pieces, rows, N]."""
        choice = choose("input_gradient", architecture(grad.device), grad.dtype, out.shape[1])
        described = choice.descriptors and grad.numel() * weight.numel() > 0
        multiply(
            matrices(grad[:, None], descriptors=described, rows=grad.shape[1]),
            weight_matrices(weight, descriptors=described, transposed=False),
            out,
            choice.tile,
            rows_along="m",
            live=live,
            zero_dead=True,
            slots=choice.slots(grad.device),
        )

    def weight_gradient(
        self, grad: Tensor, x: Tensor, live: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[N, K] from `grad` [pieces, rows, N]."""
        N, K = grad.shape[2], x.shape[2]
        choice = choose("weight_gradient", architecture(grad.device), grad.dtype, N, K)
        # A descriptor ends where the allocation does, not with the live rows.
        described = choice.descriptors and live is None and grad.numel() * x.numel() > 0
        return weight_gradient(
            matrices(grad[:, None].mT, descriptors=described, rows=grad.shape[1]),
            matrices(x[:, None], descriptors=described, rows=x.shape[1]),
            choice.tile,
            rows_along="k",
            live=live,
            dtype=dtype,
            slots=choice.slots(grad.device),
        )


MATRICES = Matrices()


def unsupported(device: torch.device, x: Sequence[Tensor], *rest: object) -> str | None:
    """Why it cannot take a call, or None."""
    return triton_stages.unsupported(device, x)


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Tensor | None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, N] of the last stage."""
    return triton_stages.forward(MATRICES, x, weight, bias, stages, partial_dtype)


def backward(
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for."""
    return triton_stages.backward(MATRICES, grad, x, weight, stages, wants)
