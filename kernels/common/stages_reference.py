"""What the references of split linear ops share: broadcast and concatenate, torch's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.stages import Stages, accumulator


def side_by_side(
    x: Sequence[Tensor], weight: Sequence[Tensor], stages: Stages
) -> tuple[Tensor, Tensor]:
    """What the op means: all inputs broadcast to the last stage's rows, then concatenated.

    Returns:
        The inputs [rows, sum of K, ...] and the weights [N, sum of K], both in the accumulator's
        dtype. Differentiable.
    """
    wide = accumulator(x[0].dtype)
    last = len(x) - 1
    broadcast: list[Tensor] = []
    for stage, value in enumerate(x):
        rows = zero_dead_rows(value.to(wide), stages.live_of(stage))
        at = stage
        maps = []
        while at != last:
            maps.append(stages.index[at])
            at = stages.consumer[at]
        for index in maps:
            # Dead rows point at row 0, which there may be none of.
            empty = rows.shape[0] == 0
            rows = rows.new_zeros((index.shape[0], *rows.shape[1:])) if empty else rows[index]
        broadcast.append(rows)
    return torch.cat(broadcast, 1), torch.cat([w.to(wide) for w in weight], 1)


def backward(
    forward: Callable[..., Tensor],
    grad: Tensor,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    stages: Stages,
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients asked for, by torch through `forward`; arguments as in `stages.define`."""
    n = len(x)
    bias = grad.new_zeros(grad.shape[1:])  # as good as any: it changes no gradient
    arguments = (*x, *weight, bias)
    wanted = [i for i, want in enumerate(wants) if want]

    def function(*given: Tensor) -> Tensor:
        args = list(arguments)
        for i, value in zip(wanted, given, strict=True):
            args[i] = value
        return forward(
            args[:n], args[n : 2 * n], args[2 * n] if wants[2 * n] else None, stages, None
        )

    return list(gradients(function, [arguments[i] for i in wanted], [grad]))
