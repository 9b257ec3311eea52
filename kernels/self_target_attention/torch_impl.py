"""The broadcast-free path of `self_target_attention`: target attention with one more kind of row.

On CUDA it waits for the device and cannot be captured, as target attention's plain path does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.target_attention import engine
from ikbo_tree.kernels.target_attention.core import NOTHING
from ikbo_tree.kernels.target_attention.engine import Call, Result, Saved, Sums
from ikbo_tree.kernels.target_attention.folded import Spans, key_spans, row_spans
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
    """(o_self, o, lse_self, lse)."""
    calls = _calls(q_self, q, memory, live, live_of, causal, scale)
    own, target = (_attend(call, NOTHING if i else 0.0) for i, call in enumerate(calls))
    if live is not None:
        target.lse[int(live) :] = 0
    shape = q_self.shape[:-1]
    o_self = own.o.view(*shape, own.o.shape[-1]).to(q_self.dtype)
    return o_self, target.o.to(q.dtype), own.lse.view(shape), target.lse


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
    """Gradients of those of q_self, q, k, v that are needed, each rounded once."""
    calls = _calls(q_self, q, memory, live, live_of, causal, scale)
    wide = calls[0].wide
    dq_self, dq, dk, dv = (
        x.new_zeros(x.shape, dtype=wide) if needed else None
        for x, needed in zip((q_self, q, memory.k, memory.v), needs, strict=True)
    )
    own = [
        None if x is None else _own_rows(x, memory) for x in (*grads[::2], *results[::2], dq_self)
    ]
    target = (*grads[1::2], *results[1::2], dq)
    for i, (call, parts) in enumerate(zip(calls, (own, target), strict=True)):
        do, dlse, o, lse, sum_q = parts
        if do is not None or dlse is not None:
            assert o is not None
            assert lse is not None
            saved = _saved(call, do, dlse, o, lse)
            sums = Sums(sum_q, dk, dv, None)
            engine.backward(call, saved, sums, add_rows=False, add_keys=i > 0)
    found = zip((dq_self, dq, dk, dv), (q_self, q, memory.k, memory.v), strict=True)
    return [x.to(like.dtype) for x, like in found if x is not None]


def _calls(
    q_self: Tensor,
    q: Tensor,
    memory: Memory,
    live: Tensor | None,
    live_of: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Call, Call]:
    """The history's rows, each a segment as long as its keys; and the rows below it."""
    keys = key_spans(memory)
    lengths = keys.counts.copy()
    if live_of is not None:
        lengths[int(live_of) :] = 0
    rows = Spans(keys.starts, lengths)
    own = Call(_own_rows(q_self, memory), memory, rows, keys, scale, causal)
    return own, Call(q, memory, row_spans(memory, q.shape[0], live), keys, scale)


def _own_rows(x: Tensor, memory: Memory) -> Tensor:
    """[entries, 1, ...]: every position of the history a query row."""
    return (x if memory.packed else x.flatten(0, 1)).unsqueeze(1)


def _attend(call: Call, lse_over_nothing: float) -> Result:
    shape = call.q.shape[:-1]
    o = call.q.new_zeros((*shape, call.memory.v.shape[-1]), dtype=call.wide)
    result = Result(o, call.q.new_full(shape, lse_over_nothing, dtype=call.wide))
    engine.forward(call, result, first=True)
    return result


def _saved(call: Call, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor) -> Saved:
    do = torch.zeros_like(o) if do is None else do
    # See target attention's backward for why not from a rounded output.
    wide = o if o.dtype == lse.dtype else _attend(call, 0.0).o
    return Saved(do, dlse, wide, lse.masked_fill(lse == NOTHING, float("inf")))
