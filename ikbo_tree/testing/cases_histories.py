"""Random calls of what reads histories and tables: pooling, look-ups, HSTU's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.kernels.silu_attention import reference as silu_reference
from ikbo_tree.ops.embeddings import embedding
from ikbo_tree.ops.pooling import attention_pool, pool
from ikbo_tree.ops.silu_attention import silu_attention
from ikbo_tree.testing.cases import (
    Arrays,
    Call,
    Input,
    Rows,
    Tensors,
    flag,
    op_case,
    pick,
    reachable,
    some_of,
)
from ikbo_tree.testing.cases_attention import DrawnMemory, Owned
from ikbo_tree.testing.cases_composed import Outputs, Switch, against_flat, padded, source
from ikbo_tree.testing.oracles import Array, OracleMemory, Parents
from ikbo_tree.tree import BroadcastTree

_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _entries(owned: Owned, x: Tensor, row: int) -> Tensor:
    """What a row owns."""
    if owned.offsets is not None:
        return x[int(owned.offsets[row]) : int(owned.offsets[row + 1])]
    return x[row] if owned.lengths is None else x[row, : int(owned.lengths[row])]


def _flat_pool(x: Tensor, how: str) -> Tensor:
    if how == "max":
        return x.amax(0) if len(x) else x.new_full(x.shape[1:], -torch.inf)
    return x.sum(0) / (max(len(x), 1) if how == "mean" else 1)


def _flat_attention(x: Tensor, scores: Tensor) -> Tensor:
    return (scores.softmax(0).unsqueeze(-1) * x).sum(0)


class _PoolTerms(torch.autograd.Function):
    """`_flat_attention`, its gradients the sums of the absolute values of their terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(x, scores)
        return _flat_attention(x, scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, scores = ctx.saved_tensors
        p = scores.softmax(0)
        size = (grad.abs() * x.abs()).sum(-1)
        return p.unsqueeze(-1) * grad.abs(), p * (size + (p * size).sum(0))


def _row_by_row(
    tree: BroadcastTree, owned: Owned, x: Tensors, tail: tuple[int, ...], function: Any
) -> Tensor:
    """`function` of what each live row owns of each input."""
    rows = range(tree.rows(owned.level))
    out = [function(*(_entries(owned, part, row) for part in x.values())) for row in rows]
    # Differentiable where no row is live, too; and one that is cut off again, for stack.
    none = torch.stack([part.flatten()[:0].sum() for part in x.values()]).sum()
    found = torch.stack([*out, none.new_zeros(tail)])[:-1] + none
    return padded(tree, owned.level, found)


@op_case("pool")
def _pool(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    owned = Owned.draw(tree, pick(rng, [*tree.levels, *tree.tables]), rng)
    how = pick(rng, ["mean", "sum", "max"])
    tail: tuple[int, ...] = pick(rng, [(), (1,), (5,), (2, 3), (0,)])
    options: dict[str, Any] = {"level": owned.level, "op": how}

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        return (pool(x["x"], tree=tree, impl=impl, **options, **owned.options(tree)),)

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        return (_row_by_row(tree, owned, x, tail, lambda part: _flat_pool(part, how)),)

    return against_flat(
        "pool",
        f"pool(x, tree=tree{source(options)}, {_extent(owned)})",
        {"x": Input(**owned.rows(), shape=owned.shape(*tail))},
        [Rows(owned.level)],
        run,
        meaning,
        continuous=how != "max",
        multilinear=how != "max",
    )


@op_case("attention_pool")
def _attention_pool(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    owned = Owned.draw(tree, pick(rng, [*tree.levels, *tree.tables]), rng)
    tail: tuple[int, ...] = pick(rng, [(1,), (5,), (2, 3)])
    options: dict[str, Any] = {"level": owned.level}
    terms = Switch()

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        given = {**options, **owned.options(tree)}
        return (attention_pool(x["x"], x["scores"], tree=tree, impl=impl, **given),)

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        attend: Callable[..., Tensor] = _PoolTerms.apply if terms.on else _flat_attention
        return (_row_by_row(tree, owned, x, tail, attend),)

    return against_flat(
        "attention_pool",
        f"attention_pool(x, scores, tree=tree{source(options)}, {_extent(owned)})",
        {
            "x": Input(**owned.rows(), shape=owned.shape(*tail)),
            "scores": Input(**owned.rows(), shape=owned.shape(*tail[:-1])),
        },
        [Rows(owned.level)],
        run,
        meaning,
        terms=terms.turned_on,
    )


def _extent(owned: Owned) -> str:
    if owned.offsets is not None:
        return f"offsets={owned.offsets.tolist()}"
    return f"lengths={None if owned.lengths is None else owned.lengths.tolist()}"


@op_case("embedding")
def _embedding(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, [*tree.levels, *tree.tables])
    tail: tuple[int, ...] = pick(rng, [(), (1,), (3,), (2, 2), (0,)])
    size = pick(rng, [1, 4, 50])
    given = torch.from_numpy(rng.integers(0, size, (tree.rows(level), *tail)))
    dtype = pick(rng, _IDS)
    options: dict[str, Any] = {"level": level, "unique": flag(rng)}

    def ids(tree: BroadcastTree) -> Tensor:
        """Nonsense in dead rows."""
        found = torch.full((tree.capacity(level), *tail), 99, dtype=dtype)
        found[: len(given)] = given
        return found.to(tree.device)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        return (embedding(ids(tree), x["weight"], tree=tree, impl=impl, **options),)

    def meaning(tree: BroadcastTree, x: Tensors) -> Outputs:
        return (padded(tree, level, x["weight"][given]),)

    return against_flat(
        "embedding",
        f"embedding(ids{list(tail)}, weight, tree=tree{source(options)}, {dtype})",
        {"weight": Input(shape=(size, 3))},
        [Rows(level)],
        run,
        meaning,
        multilinear=True,
        entangled=True,  # no input has rows that could spoil others
    )


class _SiluTerms(torch.autograd.Function):
    """`attend` and its gradients, as sums of the absolute values of their terms.

    The slope of silu is at most 1.1, and errs with the score that it is taken at.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, valid: Tensor, scale: float
    ) -> Tensor:
        q, k, v = q.abs(), k.abs(), v.abs()
        scores = torch.einsum("rnhd,rkhd->rnhk", q, k) * abs(scale)
        scores = scores + bias.abs().transpose(1, 2).unsqueeze(1)
        weights = scores.masked_fill(~valid[:, None, None, :], 0)
        ctx.save_for_backward(q, k, v, weights, valid)
        ctx.scale = abs(scale)
        return torch.einsum("rnhk,rkhd->rnhd", weights, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, valid = ctx.saved_tensors
        size = grad.abs()
        ds = torch.einsum("rnhd,rkhd->rnhk", size, v) * 1.1 * (1 + weights)
        ds = ds.masked_fill(~valid[:, None, None, :], 0)
        dq = torch.einsum("rnhk,rkhd->rnhd", ds, k) * ctx.scale
        dk = torch.einsum("rnhk,rnhd->rkhd", ds, q) * ctx.scale
        dv = torch.einsum("rnhk,rnhd->rkhd", weights, size)
        return dq, dk, dv, ds.sum(1).transpose(1, 2), None, None


def _silu_by_loops(
    tree: BroadcastTree,
    q: Array,
    owned: list[OracleMemory],
    level: str,
    length: Array | float | None,
    scale: float,
) -> Array:
    """One row, head and key at a time."""
    out = np.zeros((*q.shape[:-1], owned[0].v.shape[-1]), q.dtype)
    up, heads = Parents(tree), q.shape[2]
    for row in range(tree.rows(level)):
        parts = [memory.of_row(up.above(level, row, memory.level)) for memory in owned]
        keys = sum(len(k) for k, _, _ in parts)
        over = max(1, keys) if length is None else np.broadcast_to(length, len(q))[row]
        for k, v, bias in parts:
            for key in range(len(k)):
                for head in range(heads):
                    shared = head * k.shape[1] // heads
                    score = q[row, :, head] @ k[key, shared] * scale
                    if bias is not None:
                        score = score + (bias[key] if bias.ndim == 1 else bias[key, head])
                    weight = score / (1 + np.exp(-score)) / over
                    out[row, :, head] += weight[:, None] * v[key, shared]
    return out


@op_case("silu_attention")
def _silu_attention(tree: BroadcastTree, rng: np.random.Generator) -> Call:
    level = pick(rng, tree.levels)
    names = some_of(rng, reachable(tree, level) * 2)[:3]
    memories = [DrawnMemory.draw(tree, name, str(i), rng) for i, name in enumerate(names)]
    n, (heads, shared) = pick(rng, [1, 2, 5]), pick(rng, [(1, 1), (2, 2), (4, 2)])
    dim = pick(rng, [1, 4, 24])
    width, scale = pick(rng, [dim, 3]), pick(rng, [None, 0.7])
    inputs = {"q": Input(level, shape=(n, heads, dim))}
    for memory in memories:
        inputs |= memory.inputs(shared, dim, width, heads, rng)
    lengths = torch.from_numpy(rng.integers(1, 9, tree.rows(level)))
    kind = pick(rng, ["number", "each", "keys"])

    def length(tree: BroadcastTree) -> Tensor | float | None:
        """Zero for dead rows."""
        if kind != "each":
            return 7.0 if kind == "number" else None
        return padded(tree, level, lengths).to(tree.device, torch.int32)

    def run(tree: BroadcastTree, x: Tensors, impl: str) -> Outputs:
        listed = [memory.memory(tree, x) for memory in memories]
        options: dict[str, Any] = {"length": length(tree), "scale": scale, "impl": impl}
        return (silu_attention(x["q"], listed, tree=tree, level=level, **options),)

    def oracle(tree: BroadcastTree, x: Arrays) -> tuple[Array, ...]:
        owned = [memory.oracle(x) for memory in memories]
        over = length(tree)
        by = over.numpy() if isinstance(over, Tensor) else over
        factor = dim**-0.5 if scale is None else scale
        return (_silu_by_loops(tree, x["q"], owned, level, by, factor),)

    listed = ", ".join(memory.code() for memory in memories)
    return Call(
        "silu_attention",
        f"silu_attention(q, [{listed}], level={level!r}, scale={scale}, length by {kind})",
        inputs,
        (Rows(level),),
        run,
        oracle,
        terms=lambda: mock.patch.object(silu_reference, "attend", _SiluTerms.apply),
    )
