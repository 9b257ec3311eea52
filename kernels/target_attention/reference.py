"""What `target_attention` means: K/V copied to the query rows, joined by keys, one softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ikbo_tree.kernels.common.differentiate import gradients
from ikbo_tree.kernels.common.routes import live_mask, zero_dead_rows
from ikbo_tree.kernels.target_attention.memories import Memory

NOTHING = float("-inf")


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse); differentiable. Waits for a CUDA device to learn how long packed rows are."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads = q.shape[0], q.shape[2]
    row_live = live_mask(rows, live, q.new_empty(rows, 1))
    flat = [broadcast(memory, rows, heads, row_live, wide) for memory in memories]
    k, v, bias, valid = (torch.cat(parts, dim=1) for parts in zip(*flat, strict=True))
    queries = zero_dead_rows(q, live).to(wide)
    o, lse = attend(queries, k, v, bias, valid.unsqueeze(1), scale)
    return zero_dead_rows(o, live).to(q.dtype), zero_dead_rows(lse, live)


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    memories: Sequence[Memory],
    live: Tensor | None,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of q, *k, *v, *bias that are needed, by torch through `forward`."""
    count = len(memories)
    inputs = [q, *(m.k for m in memories), *(m.v for m in memories)]
    inputs += [m.bias for m in memories if m.bias is not None]

    def function(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        biases = iter(rest[2 * count :])
        replaced = [
            replace(m, k=k, v=v, bias=None if m.bias is None else next(biases))
            for m, k, v in zip(memories, rest[:count], rest[count : 2 * count], strict=True)
        ]
        return forward(q, replaced, live, scale)

    found = gradients(
        function, inputs, [grad_o, torch.zeros_like(lse) if grad_lse is None else grad_lse]
    )
    return [x for x, needed in zip(found, needs, strict=True) if needed]


def broadcast(
    memory: Memory, rows: int, heads: int, row_live: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A memory copied to the query rows: what is no key is zero, whatever it held.

    Returns:
        k and v [rows, keys, heads, ...], bias [rows, keys, heads], which are keys [rows, keys].
    """
    index = memory.index
    if index is None:
        index = torch.arange(rows, device=memory.k.device)
    at, valid = key_positions(memory)
    if at.shape[0] == 0:  # then every query row is dead, and its map points at a row 0 that is not
        at, valid = at.new_zeros(rows, 0), valid.new_zeros(rows, 0)
    else:
        at, valid = at[index], valid[index]
    if row_live is not None:
        valid = valid & row_live
    if memory.mask is not None:
        valid = valid & memory.mask.flatten()[at]
    k, v = (
        torch.where(valid[..., None, None], x, 0).repeat_interleave(heads // x.shape[2], dim=2)
        for x in (_flat(memory, y).to(wide)[at] for y in (memory.k, memory.v))
    )
    if memory.bias is None:
        return k, v, k.new_zeros((*valid.shape, heads)), valid
    bias = _flat(memory, memory.bias).to(wide)[at]
    if not memory.bias_has_heads:
        bias = bias.unsqueeze(-1)
    return k, v, torch.where(valid[..., None], bias, 0).expand(-1, -1, heads), valid


def key_positions(memory: Memory) -> tuple[Tensor, Tensor]:
    """Where the keys of each row of a memory lie, the mask not looked at.

    Returns:
        Positions in k with the rows of a padded one joined, and whether each is a key; both [rows,
        longest].
    """
    k, extent = memory.k, memory.extent
    if memory.packed:
        assert extent is not None
        bounds = extent.to(torch.int64).clamp(0, k.shape[0])
        start, length = bounds[:-1], (bounds[1:] - bounds[:-1]).clamp(min=0)
        longest = int(length.max()) if length.numel() else 0
    else:
        rows, longest = k.shape[:2]
        start = torch.arange(rows, device=k.device) * longest
        length = torch.full_like(start, longest) if extent is None else extent
    steps = torch.arange(longest, device=k.device)
    valid = steps < length.unsqueeze(1)
    return torch.where(valid, start.unsqueeze(1) + steps, 0), valid


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One softmax a row and head; over nothing 0 and -inf.

    Args:
        q: [rows, n, H, D].
        k: [rows, keys, H, D].
        v: [rows, keys, H, Dv].
        bias: [rows, keys, H] or None.
        valid: [rows, 1 or n, keys] bool, which keys take part.
        scale: factor of the scores.
    """
    if k.shape[1] == 0 or q.numel() == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_full(q.shape[:-1], NOTHING)
    scores = torch.einsum("rnhd,rkhd->rnhk", q, k) * scale
    if bias is not None:
        scores = scores + bias.transpose(1, 2).unsqueeze(1)
    scores = scores.masked_fill(~valid.unsqueeze(2), NOTHING)
    peak = scores.detach().amax(-1, keepdim=True)
    terms = (scores - peak.masked_fill(peak == NOTHING, 0)).exp()
    total = terms.sum(-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    o = torch.einsum("rnhk,rkhd->rnhd", terms / total, v).contiguous()
    lse = (total.log() + peak).masked_fill(nothing, NOTHING)
    return o, lse.squeeze(-1)


def _flat(memory: Memory, x: Tensor) -> Tensor:
    return x if memory.packed else x.flatten(0, 1)
