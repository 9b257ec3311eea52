"""Attention of fine rows to the keys and values that their ancestors own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.self_target_attention.op import (
    self_target_attention as _self_target_attention,
)
from ikbo_tree.kernels.target_attention.op import target_attention as _target_attention
from ikbo_tree.ops.memories import FLOATS, Memory, check_like, checked_memory, shape_of
from ikbo_tree.tree import BroadcastTree, Plan


@overload
def target_attention(
    q: Tensor,
    memories: Mapping[str, tuple[Tensor, Tensor]] | Sequence[Memory],
    *,
    tree: BroadcastTree,
    level: str,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    plan: Plan | None = None,
    impl: str = "auto",
) -> Tensor: ...


@overload
def target_attention(
    q: Tensor,
    memories: Mapping[str, tuple[Tensor, Tensor]] | Sequence[Memory],
    *,
    tree: BroadcastTree,
    level: str,
    scale: float | None = None,
    return_lse: Literal[True],
    plan: Plan | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def target_attention(
    q: Tensor,
    memories: Mapping[str, tuple[Tensor, Tensor]] | Sequence[Memory],
    *,
    tree: BroadcastTree,
    level: str,
    scale: float | None = None,
    return_lse: bool,
    plan: Plan | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def target_attention(
    q: Tensor,
    memories: Mapping[str, tuple[Tensor, Tensor]] | Sequence[Memory],
    *,
    tree: BroadcastTree,
    level: str,
    scale: float | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each row's queries to everything that its ancestors own, in one softmax.

    Keys and values stay at their own level; all query rows below one of its rows share them (target
    attention of the published in-kernel broadcast system, for trees of any depth). With several
    memories it is softmax over the union of their keys, not a sum of attentions.

    Args:
        q: [rows of `level`, n_seed, H, D], any strides: n_seed query rows for each row.
        memories: (k, v) for each level or table, padded and of equal lengths; or any number of
            `Memory`, several a level allowed. They lie at `level` itself (a row attends to its
            own), above it, or at a table reached from it.
        tree: the tree.
        level: the level of the queries.
        scale: factor of the scores; default 1 / sqrt(D).
        return_lse: also return the log-sum-exp of the scores, with which results over further
            keys can be merged. Gradients pass through it.
        plan: from `ikbo_tree.plan`, an order of work for kernels in tiles; changes no result.
        impl: `"auto"`, `"reference"`, `"torch"`, ... `"torch"` waits for the device on CUDA, since
            uneven segments have sizes that only the device knows.

    Returns:
        o [rows of `level`, n_seed, H, Dv] in q's dtype, computed in float32 (float64 for float64);
        with `return_lse`, (o, lse), lse [rows of `level`, n_seed, H] in float32 (float64), natural
        logarithm. A row with nothing to attend to has o 0, lse -inf and zero gradients. Dead rows
        are zero in both. Differentiable once, by q, k, v and bias.

    Raises:
        TreeError: unknown names, a memory not above `level`; shapes, rows, values or devices that
            do not fit.
        TypeError: dtypes that do not fit.
        UnsupportedError: `impl` cannot run this call.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> k, v = torch.zeros(2, 2, 1, 4), torch.tensor([[1.0, 2.0], [3.0, 5.0]]).view(2, 2, 1, 1)
    >>> o = target_attention(torch.zeros(3, 1, 1, 4), {"user": (k, v)}, tree=tree, level="item")
    >>> o.flatten().tolist()
    [1.5, 1.5, 4.0]
    """
    checked_name(impl)
    check_queries("q", q, tree, level)
    named = named_memories(memories)
    tree.chain("memories", [memory.level for memory in named.values()], level)
    checked = [checked_memory(name, memory, q, tree) for name, memory in named.items()]
    first = named[next(iter(named))]
    for name, memory in named.items():
        if memory.v.shape[-1] != first.v.shape[-1]:
            width = f"must be {first.v.shape[-1]} wide, like the first memory's"
            raise TreeError(f"{name}.v", width, shape_of(memory.v))
    if plan is not None:
        _check_plan(plan, tree, level)
    routes = [tree.route(level, memory.level) for memory in checked]
    biases = [(i, m.bias) for i, m in enumerate(checked) if m.bias is not None]
    o: Tensor
    lse: Tensor
    o, lse = _target_attention(
        q,
        [memory.k for memory in checked],
        [memory.v for memory in checked],
        [bias for _, bias in biases],
        [i for i, _ in biases],
        [memory.offsets if memory.lengths is None else memory.lengths for memory in checked],
        [memory.mask for memory in checked],
        [None if route is None else route.index for route in routes],
        [None if route is None else route.offsets for route in routes],
        [None if route is None else route.order for route in routes],
        tree.live(level),
        default_scale(scale, q),
        impl,
    )
    return (o, lse) if return_lse else o


def self_target_attention(
    q_self: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tree: BroadcastTree,
    level: str,
    of: str,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Self-attention of each history and target attention to it, over the same keys and values.

    One call instead of two: the gradients of the shared keys and values are summed before they are
    rounded, and a kernel reads them once (self + target fusion of the published system).

    Args:
        q_self: [rows of `of`, S, H, D], packed [total, H, D]: a query for each key.
        q: [rows of `level`, n_seed, H, D].
        k: [rows of `of`, S, Hkv, D], packed [total, Hkv, D]; see `Memory`.
        v: [rows of `of`, S, Hkv, Dv], packed [total, Hkv, Dv].
        tree: the tree.
        level: the level of `q`.
        of: the level or table that owns the history: `level` or above it.
        lengths: [rows of `of`], if padded; None: S each.
        offsets: [rows of `of` + 1], if packed.
        causal: query i of a history attends to its keys 0 ... i. Says nothing about `q`.
        scale: factor of the scores; default 1 / sqrt(D).
        return_lse: also return both log-sum-exps.
        impl: see `target_attention`.

    Returns:
        (o_self, o_target), like `q_self` and `q` but Dv wide; with `return_lse` (o_self, o_target,
        lse_self, lse_target). Entries of o_self and lse_self that no row owns are zero. All else as
        in `target_attention`.

    Raises:
        TreeError: unknown names, `of` not above `level`; shapes, rows, values or devices that do
            not fit.
        TypeError: dtypes that do not fit.
        UnsupportedError: `impl` cannot run this call.
    """
    checked_name(impl)
    check_queries("q", q, tree, level)
    tree.chain("of", [of], level)
    memory = checked_memory("", Memory(of, k, v, lengths, offsets), q, tree)
    expected = (*k.shape[:-2], *q.shape[2:])
    if tuple(q_self.shape) != expected:
        raise TreeError(
            "q_self", f"must have shape {expected}, a query for each key", shape_of(q_self)
        )
    check_like("q_self", q_self, q)
    route = tree.route(level, of)
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _self_target_attention(
        q_self,
        q,
        k,
        v,
        memory.offsets if memory.lengths is None else memory.lengths,
        *((None, None, None) if route is None else (route.index, route.offsets, route.order)),
        tree.live(level),
        tree.live(of),
        causal,
        default_scale(scale, q),
        impl,
    )
    return results if return_lse else results[:2]


def named_memories(
    memories: Mapping[str, tuple[Tensor, Tensor]] | Sequence[Memory],
) -> dict[str, Memory]:
    """The memories by what their caller would call them."""
    if isinstance(memories, Mapping):
        named = {f'memories["{name}"]': Memory(name, *kv) for name, kv in memories.items()}
    else:
        named = {f"memories[{i}]": memory for i, memory in enumerate(memories)}
    if not named:
        raise TreeError("memories", "must have at least one entry", "none")
    return named


def check_queries(argument: str, q: Tensor, tree: BroadcastTree, level: str) -> None:
    """Raises TypeError or TreeError where q is not [rows of `level`, n_seed, H, D]."""
    tree.structure.at("level", level)
    if q.dtype not in FLOATS:
        raise TypeError(f"{argument} must be float64, float32, float16 or bfloat16; got {q.dtype}")
    if q.dim() != 4 or q.shape[3] == 0:
        raise TreeError(argument, "must have shape [rows, n_seed, H, D], D > 0", shape_of(q))
    tree.check(argument, q, level)


def _check_plan(plan: Plan, tree: BroadcastTree, level: str) -> None:
    if plan.op != "target_attention" or plan.level != level:
        rule = f"must be made for target_attention at level {level!r}"
        raise TreeError("plan", rule, f"{plan.op} at level {plan.level!r}")
    if not torch.compiler.is_compiling() and plan.rows != tree.rows(level):
        rule = f"must be of a tree with {tree.rows(level)} rows at level {level!r}"
        raise TreeError("plan", rule, f"one with {plan.rows}")


def default_scale(scale: float | None, q: Tensor) -> float:
    """The factor of the scores: 1 / sqrt(D) where none is given."""
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
