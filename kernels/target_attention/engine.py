"""Attention to one memory, forward and backward, chunk by chunk.

Partial results of memories meet by their log-sum-exps; gradients are recomputed from the
log-sum-exp over all of them. Both in float32 (float64 for float64), so that neither the number of
memories nor 16-bit operands cost accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ikbo_tree.kernels.target_attention import core
from ikbo_tree.kernels.target_attention.folded import (
    Chunk,
    Limits,
    Piece,
    Spans,
    chunks,
    put_keys,
    put_rows,
    sub_rows,
    take_keys,
    take_rows,
)
from ikbo_tree.kernels.target_attention.memories import Memory

CPU_ROWS = 1 << 16
CPU_KEYS = 1 << 19
"""Elements for each thread: what an op takes beyond its results stays in the caches and small."""
CUDA_LIMIT = 1 << 25
ROWS_SHARE = 64
"""A call's rows may also be this part of all rows: large inputs are not cut into more calls."""


class Call(NamedTuple):
    """One memory and the rows that attend to it.

    Attributes:
        q: [rows, n, H, D].
        memory: the keys and values; its route is in `rows`.
        rows: query rows of each segment.
        keys: keys of each segment.
        scale: factor of the scores.
        causal: row i of a segment attends to its keys 0 ... i.
    """

    q: Tensor
    memory: Memory
    rows: Spans
    keys: Spans
    scale: float
    causal: bool = False

    @property
    def wide(self) -> torch.dtype:
        """Dtype of partial results."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def widened(self, x: Tensor) -> Tensor:
        """`x` in that dtype."""
        return x if x.dtype == self.wide else x.to(self.wide)

    @property
    def limits(self) -> Limits:
        """How much to do in a call of dense attention."""
        q, k, v = self.q, self.memory.k, self.memory.v
        row_width = q.shape[1] * q.shape[2] * max(q.shape[3], v.shape[-1])
        key_width = k.shape[-2] * (k.shape[-1] + v.shape[-1])
        if q.device.type != "cpu":
            return Limits(row_width, key_width, CUDA_LIMIT, CUDA_LIMIT)
        threads = torch.get_num_threads()
        rows = max(CPU_ROWS * threads, q.shape[0] * row_width // ROWS_SHARE)
        return Limits(row_width, key_width, rows, CPU_KEYS * threads)

    @property
    def groups(self) -> int:
        """Query heads that share a head of keys: heads j * groups + g for g in range(groups)."""
        return self.q.shape[2] // self.memory.k.shape[-2]

    def chunks(self, limits: Limits) -> Iterator[Chunk]:
        """The work, in calls of dense attention."""
        if self.q.numel() == 0:
            return iter(())
        return chunks(self.rows, self.keys, limits, self.q.device)

    def blocks(self, rows: Piece, limits: Limits) -> Iterator[Piece]:
        """The rows of a chunk, those of a single long segment in runs."""
        if self.causal:
            return iter((rows,))
        return sub_rows(rows, max(1, limits.rows // limits.row_width))


class Result(NamedTuple):
    """Output [rows, n, H, Dv] and log-sum-exp [rows, n, H]."""

    o: Tensor
    lse: Tensor


class Saved(NamedTuple):
    """What a backward starts from.

    Attributes:
        do: [rows, n, H, Dv], any float dtype and strides.
        dlse: [rows, n, H] or None.
        o: [rows, n, H, Dv] over all memories, in `Call.wide`.
        lse: [rows, n, H], likewise, +inf for rows that attended to nothing.
    """

    do: Tensor
    dlse: Tensor | None
    o: Tensor
    lse: Tensor


class Sums(NamedTuple):
    """Gradients to write: contiguous, zeros at first; None where not needed."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


class Operands(NamedTuple):
    """A chunk's keys for one head of each group: [B, L, Hkv, ...], bias [B, 1 or Hkv, 1, L]."""

    k: Tensor
    v: Tensor
    bias: Tensor | None


def forward(call: Call, result: Result, *, first: bool) -> None:
    """Attends to one memory and merges into `result`, or writes it where `first`."""
    limits = call.limits
    options = core.Options(call.causal, call.scale, limits.keys)
    for chunk in call.chunks(limits):
        operands = _load_keys(call, chunk.keys)
        for piece in call.blocks(chunk.rows, limits):
            part = _attend(call, call.widened(take_rows(call.q, piece)), operands, options)
            if not first:
                part = merge(Result(*(take_rows(x, piece) for x in result)), part)
            put_rows(result.o, piece, part.o)
            put_rows(result.lse, piece, part.lse)


def merge(a: Result, b: Result) -> Result:
    """The result over two disjoint sets of keys; twice nothing is nothing."""
    lse = torch.logaddexp(a.lse, b.lse)
    peak = lse.masked_fill(lse == core.NOTHING, 0)
    weight_a, weight_b = ((x.lse - peak).exp_().unsqueeze(-1) for x in (a, b))
    return Result(a.o * weight_a + b.o * weight_b, lse)


def backward(call: Call, saved: Saved, sums: Sums, *, add_rows: bool, add_keys: bool) -> None:
    """Writes the gradients that pass through one memory into `sums`, or adds them."""
    padded = not call.memory.packed
    limits = call.limits
    options = core.Options(call.causal, call.scale, limits.keys)
    for chunk in call.chunks(limits):
        operands = _load_keys(call, chunk.keys)
        totals: tuple[Tensor | None, ...] = (None, None, None)
        for piece in call.blocks(chunk.rows, limits):
            dq, *parts = _gradients(call, saved, sums, piece, operands, options)
            if sums.q is not None and dq is not None:
                put_rows(sums.q, piece, dq, add=add_rows)
            totals = tuple(
                x if total is None or x is None else total.add_(x)
                for total, x in zip(totals, parts, strict=True)
            )
        for whole, total in zip(sums[1:], totals, strict=True):
            if whole is not None and total is not None:
                put_keys(whole, chunk.keys, total, padded=padded, add=add_keys)


def _load_keys(call: Call, piece: Piece) -> list[Operands]:
    """Operands of each g in range(groups)."""
    memory, padded = call.memory, not call.memory.packed
    k, v = (call.widened(take_keys(x, piece, padded=padded)) for x in (memory.k, memory.v))
    bias = None
    if memory.bias is not None:
        bias = call.widened(take_keys(memory.bias, piece, padded=padded))
        bias = bias.transpose(1, 2) if memory.bias_has_heads else bias.unsqueeze(1)
        bias = bias.unsqueeze(2)
    # A causal row lies before its segment's end, and so before what pads it.
    if piece.valid is not None and not call.causal:
        if bias is None:
            bias = k.new_zeros((piece.batch, 1, 1, piece.width))
        bias = bias.masked_fill(~piece.valid[:, None, None, :], core.NOTHING)
    if bias is None or bias.shape[1] == 1:
        return [Operands(k, v, bias)] * call.groups
    return [Operands(k, v, bias[:, g :: call.groups]) for g in range(call.groups)]


def _attend(call: Call, q: Tensor, operands: list[Operands], options: core.Options) -> Result:
    if call.groups == 1:
        return Result(*core.forward(q, *operands[0], options))
    o = q.new_empty((*q.shape[:-1], operands[0].v.shape[-1]))
    lse = q.new_empty(q.shape[:-1])
    for g, keys in enumerate(operands):
        heads = slice(g, None, call.groups)
        o[:, :, heads], lse[:, :, heads] = core.forward(q[:, :, heads], *keys, options)
    return Result(o, lse)


def _gradients(
    call: Call,
    saved: Saved,
    sums: Sums,
    piece: Piece,
    operands: list[Operands],
    options: core.Options,
) -> tuple[Tensor | None, ...]:
    """Gradients of q [B, R, H, D], k and v [B, L, Hkv, ...] and bias [B, L, ...]."""
    needs = core.Needs(*(x is not None for x in sums))
    q, o, lse = (call.widened(take_rows(x, piece)) for x in (call.q, saved.o, saved.lse))
    do = call.widened(_without_repetitions(saved.do, piece))
    dlse = None if saved.dlse is None else _without_repetitions(saved.dlse, piece)
    rows = core.Rows(q, do, o, lse, dlse)
    dq = torch.empty_like(q) if call.groups > 1 and needs[0] else None
    dk: Tensor | None = None
    dv: Tensor | None = None
    biases = []
    for g, keys in enumerate(operands):
        heads = slice(g, None, call.groups)
        group = rows.cut((slice(None), slice(None), heads))
        part = core.backward(group, *keys, needs, options)
        if dq is None:
            dq = part[0]
        elif part[0] is not None:
            dq[:, :, heads] = part[0]
        dk = part[1] if dk is None or part[1] is None else dk + part[1]
        dv = part[2] if dv is None or part[2] is None else dv + part[2]
        biases.append(part[3])
    return dq, dk, dv, _join_bias(call, biases)


def _join_bias(call: Call, parts: list[Tensor | None]) -> Tensor | None:
    """[B, L, H] or [B, L] from [B, Hkv, L] of each g."""
    known = [x for x in parts if x is not None]
    if not known:
        return None
    by_head = torch.stack(known, dim=2).flatten(1, 2)
    return by_head.transpose(1, 2) if call.memory.bias_has_heads else by_head.sum(1)


def _without_repetitions(x: Tensor, piece: Piece) -> Tensor:
    """`take_rows` with zeros in the rows that repeat another, so that they add to no gradient."""
    rows = take_rows(x, piece)
    if piece.valid is None:
        return rows
    valid = piece.valid.repeat_interleave(x.shape[1], dim=1)
    return rows.masked_fill(~valid.view(*valid.shape, *[1] * (rows.dim() - 2)), 0)
