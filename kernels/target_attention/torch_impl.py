"""The broadcast-free path of `target_attention` in plain PyTorch.

The query rows below one row of a memory are folded into one sequence over its keys; K/V are read in
place and never copied to the queries. How segments are cut is decided on the host: on a CPU that
costs nothing, on CUDA the maps and lengths are copied back first, so this path waits for the device
there and cannot be captured in a CUDA graph (dense calls need sizes that only the device knows).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.target_attention import engine
from ikbo_tree.kernels.target_attention.core import NOTHING
from ikbo_tree.kernels.target_attention.engine import Call, Result, Saved, Sums
from ikbo_tree.kernels.target_attention.folded import key_spans, row_spans
from ikbo_tree.kernels.target_attention.memories import Memory


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o in q's dtype, lse); extra memory does not grow with rows or keys."""
    o, lse = _forward_wide(q, memories, live, scale)
    if live is not None:
        lse[int(live) :] = 0
    return o.to(q.dtype), lse


def _forward_wide(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float
) -> Result:
    calls = _calls(q, memories, live, scale)
    shape, wide = q.shape[:-1], calls[0].wide
    o = q.new_zeros((*shape, memories[0].v.shape[-1]), dtype=wide)
    result = Result(o, q.new_full(shape, NOTHING, dtype=wide))
    for i, call in enumerate(calls):
        engine.forward(call, result, first=i == 0)
    return result


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
    """Gradients of those of q, *k, *v, *bias that are needed, each rounded once."""
    if o.dtype != lse.dtype:
        # From a rounded output the softmax's share of dS, sum(dO * O), would be too coarse where
        # one key takes nearly all weight and dS nearly vanishes.
        o = _forward_wide(q, memories, live, scale).o
    saved = Saved(grad_o, grad_lse, o, lse.masked_fill(lse == NOTHING, float("inf")))
    wanted = iter(needs)
    dq = q.new_zeros(q.shape, dtype=lse.dtype) if next(wanted) else None
    dk, dv, dbias = (
        [_zeros(x) if x is not None and next(wanted) else None for x in column]
        for column in (
            [m.k for m in memories],
            [m.v for m in memories],
            [m.bias for m in memories],
        )
    )
    for i, call in enumerate(_calls(q, memories, live, scale)):
        sums = Sums(dq, dk[i], dv[i], dbias[i])
        if any(x is not None for x in sums):
            engine.backward(call, saved, sums, add_rows=i > 0, add_keys=False)
    found = [None if dq is None else dq.to(q.dtype), *dk, *dv, *dbias]
    return [x for x in found if x is not None]


def _calls(q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float) -> list[Call]:
    return [Call(q, m, row_spans(m, q.shape[0], live), key_spans(m), scale) for m in memories]


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
