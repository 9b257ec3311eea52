"""What `self_target_attention` means: attention of each history to itself, and target attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import live_mask
from ikbo_tree.kernels.target_attention import reference as target
from ikbo_tree.kernels.target_attention.memories import Memory


def forward(
    q_self: Tensor,
    q: Tensor,
    memory: Memory,
    live: Tensor | None,
    live_of: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_self, o, lse_self, lse); differentiable."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Widened once, so that both parts' gradients meet before they are rounded.
    memory = replace(memory, k=memory.k.to(wide), v=memory.v.to(wide))
    o, lse = target.forward(q, [memory], live, scale)
    o_self, lse_self = _attend_self(q_self, memory, live_of, causal, scale)
    return o_self, o, lse_self, lse


def backward(
    grads: Sequence[Tensor | None],
    results: Sequence[Tensor],
    q_self: Tensor,
    q: Tensor,
    memory: Memory,
    live: Tensor | None,
    live_of: Tensor | None,
    causal: bool,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of q_self, q, k, v that are needed, by torch through `forward`."""

    def function(q_self: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        shared = replace(memory, k=k, v=v)
        return forward(q_self, q, shared, live, live_of, causal, scale)

    known = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, results, strict=True)]
    found = gradients(function, [q_self, q, memory.k, memory.v], known)
    return [x for x, needed in zip(found, needs, strict=True) if needed]


def _attend_self(
    q: Tensor, memory: Memory, live_of: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    at, valid = target.key_positions(memory)
    rows, longest = at.shape
    row_live = live_mask(rows, live_of, at)
    if row_live is not None:
        valid = valid & row_live
    flat_q, flat_k, flat_v = (
        x if memory.packed else x.flatten(0, 1) for x in (q, memory.k, memory.v)
    )
    queries, k, v = (
        torch.where(valid[..., None, None], x.to(memory.k.dtype)[at], 0)
        for x in (flat_q, flat_k, flat_v)
    )
    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[2], dim=2) for x in (k, v))
    steps = torch.arange(longest, device=q.device)
    seen = valid.unsqueeze(1) & (steps <= steps.unsqueeze(1) if causal else valid.unsqueeze(2))
    o, lse = target.attend(queries, k, v, None, seen, scale)
    # Every position is one key's at most, so nothing is written twice.
    places = at[valid]
    whole_o = o.new_zeros((flat_q.shape[0], *o.shape[2:])).index_put((places,), o[valid])
    whole_lse = lse.new_zeros((flat_q.shape[0], *lse.shape[2:])).index_put((places,), lse[valid])
    shape = q.shape[:-1]
    return whole_o.view(*shape, o.shape[-1]).to(q.dtype), whole_lse.view(shape)
