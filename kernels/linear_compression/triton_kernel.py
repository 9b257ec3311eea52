"""The Triton path of `linear_compression`: a batch of GEMMs a level, at its own batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common import triton_stages
from ikbo_tree.kernels.common.gemm_forms import architecture
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.common.triton_operands import matrices, weight_matrices
from ikbo_tree.kernels.common.triton_products import Producers, multiply, weight_gradient
from ikbo_tree.kernels.linear_compression import op
from ikbo_tree.kernels.linear_compression.config import choose


class Batches:
    """`weight [M, K] @ x [rows, K, N]`: rows are batch entries."""

    def out_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """[rows, M, N]."""
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
        """Into `out` [rows, M, N]."""
        _, M, N = out.shape
        role = "forward" if final else "partial"
        choice = choose(role, architecture(x.device), x.dtype, M, N)
        described = choice.descriptors and x.numel() > 0
        multiply(
            weight_matrices(weight, descriptors=described, transposed=False),
            matrices(x[None], descriptors=described, batched=True),
            out,
            choice.tile,
            rows_along="batch",
            live=live,
            zero_dead=final,
            slots=choice.slots(x.device),
            producers=producers,
        )

    def input_gradient(
        self, grad: Tensor, weight: Tensor, out: Tensor, live: Tensor | None
    ) -> None:
        """[rows, K, N] from `grad` [pieces, rows, M, N]."""
        _, K, N = out.shape
        choice = choose("input_gradient", architecture(grad.device), grad.dtype, K, N)
        described = choice.descriptors and grad.numel() * weight.numel() > 0
        multiply(
            weight_matrices(weight, descriptors=described, transposed=True),
            matrices(grad, descriptors=described, batched=True, rows=grad.shape[1]),
            out,
            choice.tile,
            rows_along="batch",
            live=live,
            zero_dead=True,
            slots=choice.slots(grad.device),
        )

    def weight_gradient(
        self, grad: Tensor, x: Tensor, live: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[M, K] from `grad` [pieces, rows, M, N]."""
        M, K = grad.shape[2], x.shape[2]
        choice = choose("weight_gradient", architecture(grad.device), grad.dtype, M, K)
        described = choice.descriptors and grad.numel() * x.numel() > 0
        return weight_gradient(
            matrices(grad, descriptors=described, batched=True, rows=grad.shape[1]),
            matrices(x.mT, descriptors=described, batched=True, rows=x.shape[1]),
            choice.tile,
            rows_along="batch",
            live=live,
            dtype=dtype,
            slots=choice.slots(grad.device),
        )


BATCHES = Batches()


def unsupported(device: torch.device, x: Sequence[Tensor], *rest: object) -> str | None:
    """Why it cannot take a call, or None."""
    return triton_stages.unsupported(device, x)


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, M, N] of the last stage."""
    return triton_stages.forward(BATCHES, x, weight, bias, stages, partial_dtype)


def backward(
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for."""
    return triton_stages.backward(BATCHES, grad, x, weight, stages, wants)
