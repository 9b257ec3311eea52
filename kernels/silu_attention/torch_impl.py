"""The plain PyTorch path of `silu_attention`.

Segments become calls of dense products as in target attention: the query rows below one row of a
memory are one sequence over its keys, which are read in place. There is no softmax, so memories and
runs of rows simply add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ikbo_tree.kernels.silu_attention.op import Factors
from ikbo_tree.kernels.target_attention.engine import Call
from ikbo_tree.kernels.target_attention.folded import (
    Chunk,
    Piece,
    key_spans,
    put_keys,
    put_rows,
    row_spans,
    take_keys,
    take_rows,
)
from ikbo_tree.kernels.target_attention.memories import Memory


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, factors: Factors, scale: float
) -> Tensor:
    """[rows, n_seed, H, Dv] in q's dtype; extra memory but that in float32 does not grow."""
    calls = _calls(q, memories, live, scale)
    o = q.new_zeros((*q.shape[:-1], memories[0].v.shape[-1]), dtype=calls[0].wide)
    for i, call in enumerate(calls):
        for chunk, piece in _work(call):
            keys = _load_keys(call, chunk.keys)
            queries = call.widened(take_rows(call.q, piece))
            found = q.new_empty((*queries.shape[:-1], o.shape[-1]), dtype=o.dtype)
            for block in _blocks(call, queries, keys):
                scores = _scores(queries[:, block], keys, scale)
                weights = torch.nn.functional.silu(scores, inplace=True)
                found[:, block] = torch.matmul(_known(weights, keys), keys.v).transpose(1, 2)
            put_rows(o, piece, found, add=i > 0)
    return factors.times(o, live).to(q.dtype)


def backward(
    grad: Tensor,
    q: Tensor,
    memories: Sequence[Memory],
    live: Tensor | None,
    factors: Factors,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of q, *k, *v, *bias that are needed, each rounded once."""
    wanted = iter(needs)
    calls = _calls(q, memories, live, scale)
    wide = calls[0].wide
    grad = factors.times(grad.to(wide), live)
    dq = q.new_zeros(q.shape, dtype=wide) if next(wanted) else None
    sums: list[list[Tensor | None]] = [
        [_zeros(x) if x is not None and next(wanted) else None for x in column]
        for column in (
            [m.k for m in memories],
            [m.v for m in memories],
            [m.bias for m in memories],
        )
    ]
    for i, call in enumerate(calls):
        for chunk in call.chunks(call.limits):
            keys = _load_keys(call, chunk.keys)
            parts = _Parts([column[i] is not None for column in sums], keys)
            for piece in call.blocks(chunk.rows, call.limits):
                queries = call.widened(take_rows(call.q, piece))
                d_queries = parts.add(call, piece, queries, grad, wanted_q=dq is not None)
                if dq is not None and d_queries is not None:
                    put_rows(dq, piece, d_queries, add=i > 0)
            for column, total in zip(sums, parts.totals(call), strict=True):
                whole = column[i]
                if whole is not None and total is not None:
                    put_keys(whole, chunk.keys, total, padded=not call.memory.packed)
    found = [None if dq is None else dq.to(q.dtype), *(x for column in sums for x in column)]
    return [x for x in found if x is not None]


class Keys(NamedTuple):
    """A chunk's keys with as many heads as the queries have.

    Attributes:
        k: [B, H, L, D].
        v: [B, H, L, Dv].
        bias: [B, 1 or H, 1, L] or None.
        nobody: bool [B, 1, 1, L], true for repetitions; None: there are none.
    """

    k: Tensor
    v: Tensor
    bias: Tensor | None
    nobody: Tensor | None


def _calls(q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float) -> list[Call]:
    return [Call(q, m, row_spans(m, q.shape[0], live), key_spans(m), scale) for m in memories]


def _work(call: Call) -> Iterator[tuple[Chunk, Piece]]:
    limits = call.limits
    for chunk in call.chunks(limits):
        for piece in call.blocks(chunk.rows, limits):
            yield chunk, piece


def _load_keys(call: Call, piece: Piece) -> Keys:
    memory, padded = call.memory, not call.memory.packed
    k, v = (
        call.widened(take_keys(x, piece, padded=padded)).transpose(1, 2)
        for x in (memory.k, memory.v)
    )
    if call.groups > 1:
        k, v = (x.repeat_interleave(call.groups, dim=1) for x in (k, v))
    bias = None
    if memory.bias is not None:
        bias = call.widened(take_keys(memory.bias, piece, padded=padded))
        bias = (bias.transpose(1, 2) if memory.bias_has_heads else bias.unsqueeze(1)).unsqueeze(2)
    nobody = None if piece.valid is None else ~piece.valid[:, None, None, :]
    return Keys(k, v, bias, nobody)


def _blocks(call: Call, q: Tensor, keys: Keys) -> list[slice]:
    """Runs of query rows whose scores stay within the limit."""
    batch, rows, heads, _ = q.shape
    step = max(1, call.limits.keys // (batch * heads * keys.k.shape[2]))
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def _scores(q: Tensor, keys: Keys, scale: float) -> Tensor:
    """[B, H, rows, L] from q [B, rows, H, D]."""
    scores = torch.matmul(q.transpose(1, 2), keys.k.transpose(2, 3)).mul_(scale)
    return scores if keys.bias is None else scores.add_(keys.bias)


def _known(x: Tensor, keys: Keys) -> Tensor:
    """Zero for keys that stand there twice."""
    return x if keys.nobody is None else x.masked_fill_(keys.nobody, 0)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


class _Parts:
    """Gradients of a chunk's keys, values and bias, summed over runs of its query rows."""

    def __init__(self, needs: Sequence[bool], keys: Keys) -> None:
        self.keys, (k, v, bias) = keys, needs
        self.k = torch.zeros_like(keys.k) if k else None
        self.v = torch.zeros_like(keys.v) if v else None
        self.bias = keys.k.new_zeros(keys.k.shape[:3]) if bias else None

    def add(
        self, call: Call, piece: Piece, q: Tensor, grad: Tensor, *, wanted_q: bool
    ) -> Tensor | None:
        """Adds what some query rows give; returns the gradient of those, [B, rows, H, D]."""
        do = call.widened(take_rows(grad, piece))
        if piece.valid is not None:
            # Repeated rows must not count twice.
            valid = piece.valid.repeat_interleave(grad.shape[1], dim=1)
            do = do.masked_fill(~valid[..., None, None], 0)
        dq = torch.empty_like(q) if wanted_q else None
        for block in _blocks(call, q, self.keys):
            part, out = q[:, block].transpose(1, 2), do[:, block].transpose(1, 2)
            scores = _scores(q[:, block], self.keys, call.scale)
            gates = scores.sigmoid()
            if self.v is not None:
                weights = _known(gates * scores, self.keys)
                self.v += torch.matmul(weights.transpose(2, 3), out)
            if dq is None and self.k is None and self.bias is None:
                continue
            slope = gates.mul_(scores.mul_(1 - gates).add_(1))
            ds = _known(torch.matmul(out, self.keys.v.transpose(2, 3)).mul_(slope), self.keys)
            if self.bias is not None:
                self.bias += ds.sum(2)
            ds.mul_(call.scale)
            if dq is not None:
                dq[:, block] = torch.matmul(ds, self.keys.k).transpose(1, 2)
            if self.k is not None:
                self.k += torch.matmul(ds.transpose(2, 3), part)
        return dq

    def totals(self, call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As `put_keys` takes them."""
        k, v = (
            None if x is None else x.unflatten(1, (-1, call.groups)).sum(2).transpose(1, 2)
            for x in (self.k, self.v)
        )
        bias = self.bias
        if bias is not None:
            bias = bias.transpose(1, 2) if call.memory.bias_has_heads else bias.sum(1)
        return k, v, bias
