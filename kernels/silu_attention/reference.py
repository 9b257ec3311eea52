"""What `silu_attention` means: K/V copied to the query rows, joined by keys, silu of each score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import live_mask, zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.silu_attention.op import Factors
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.reference import broadcast


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, factors: Factors, scale: float
) -> Tensor:
    """[rows, n_seed, H, Dv] in q's dtype; waits for a CUDA device, as packed rows do."""
    wide, (rows, _, heads, _) = accumulator(q.dtype), q.shape
    row_live = live_mask(rows, live, q.new_empty(rows, 1))
    flat = [broadcast(memory, rows, heads, row_live, wide) for memory in memories]
    k, v, bias, valid = (torch.cat(parts, dim=1) for parts in zip(*flat, strict=True))
    o = attend(zero_dead_rows(q, live).to(wide), k, v, bias, valid, scale)
    return factors.times(o, live).to(q.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Sums of the values by silu of the scores.

    Args:
        q: [rows, n, H, D].
        k: [rows, keys, H, D].
        v: [rows, keys, H, Dv].
        bias: [rows, keys, H].
        valid: bool [rows, keys], which keys take part.
        scale: factor of the scores.
    """
    scores = torch.einsum("rnhd,rkhd->rnhk", q, k) * scale + bias.transpose(1, 2).unsqueeze(1)
    weights = torch.nn.functional.silu(scores).masked_fill(~valid[:, None, None, :], 0)
    return torch.einsum("rnhk,rkhd->rnhd", weights, v).contiguous()


def backward(
    grad: Tensor,
    q: Tensor,
    memories: Sequence[Memory],
    live: Tensor | None,
    factors: Factors,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of q, *k, *v, *bias that are needed, by torch through `forward`."""
    count = len(memories)
    inputs = [q, *(m.k for m in memories), *(m.v for m in memories)]
    inputs += [m.bias for m in memories if m.bias is not None]

    def function(q: Tensor, *rest: Tensor) -> Tensor:
        biases = iter(rest[2 * count :])
        replaced = [
            replace(m, k=k, v=v, bias=None if m.bias is None else next(biases))
            for m, k, v in zip(memories, rest[:count], rest[count : 2 * count], strict=True)
        ]
        return forward(q, replaced, live, factors, scale)

    found = gradients(function, inputs, [grad])
    return [x for x, needed in zip(found, needs, strict=True) if needed]
