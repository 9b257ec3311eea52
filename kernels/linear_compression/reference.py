"""What `linear_compression` means: broadcast, concatenate, multiply."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common import stages_reference
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.stages import Stages


def forward(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: None,
    stages: Stages,
    partial_dtype: torch.dtype | None,
) -> Tensor:
    """[rows, M, N]; the flat op has no partial results, so `partial_dtype` changes nothing."""
    flat_x, flat_weight = stages_reference.side_by_side(x, weight, stages)
    out = torch.matmul(flat_weight, flat_x)
    return zero_dead_rows(out.to(x[0].dtype), stages.live_of(len(x) - 1))


def backward(
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for, by torch through `forward`."""
    return stages_reference.backward(forward, grad, x, weight, stages, wants)
