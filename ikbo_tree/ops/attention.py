"""Attention of fine rows to the keys and values that their ancestors own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.self_target_attention.op import (
    self_target_attention as _self_target_attention,
)
from ikbo_tree.kernels.target_attention.op import target_attention as _target_attention
from ikbo_tree.tree import BroadcastTree, Plan

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Memory:
    """Keys and values that each row of a level owns, and that all rows below it attend to.

    Padded: `k` [rows, S, Hkv, D], of which row c owns `k[c, :lengths[c]]`. Packed: `k` [total, Hkv,
    D], of which it owns `k[offsets[c]:offsets[c + 1]]`; offsets need not begin at 0, nor end where
    the buffer does. Entries that no row owns, or that are masked, are never read: NaN there is
    harmless, and their gradient is exactly zero.

    Lengths must lie in 0 ... S, offsets must not decrease nor leave the buffer. On a CPU this is
    checked (not while a call is traced); on CUDA a check would wait for the device, so there they
    are clamped, and a decreasing pair owns nothing.

    Attributes:
        level: the level or table.
        k: [rows, S, Hkv, D] or [total, Hkv, D], any strides. H query heads share its Hkv heads:
            head h uses h // (H // Hkv).
        v: [rows, S, Hkv, Dv] or [total, Hkv, Dv].
        lengths: [rows], any integer dtype, if padded; None: every row owns S.
        offsets: [rows + 1], any integer dtype, if packed.
        bias: float, [rows, S] or [rows, S, H], packed [total] or [total, H]: added to the scaled
            scores, in units of the natural logarithm (log w gives a key the weight w; -inf none).
        mask: bool, [rows, S], packed [total]: true where a key takes part.
    """

    level: str
    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    offsets: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None


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
    _check_queries("q", q, tree, level)
    named = _named(memories)
    tree.chain("memories", [memory.level for memory in named.values()], level)
    checked = [_checked(name, memory, q, tree) for name, memory in named.items()]
    first = named[next(iter(named))]
    for name, memory in named.items():
        if memory.v.shape[-1] != first.v.shape[-1]:
            width = f"must be {first.v.shape[-1]} wide, like the first memory's"
            raise TreeError(f"{name}.v", width, _shape(memory.v))
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
        _scale(scale, q),
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
    _check_queries("q", q, tree, level)
    tree.chain("of", [of], level)
    memory = _checked("", Memory(of, k, v, lengths, offsets), q, tree)
    expected = (*k.shape[:-2], *q.shape[2:])
    if tuple(q_self.shape) != expected:
        raise TreeError(
            "q_self", f"must have shape {expected}, a query for each key", _shape(q_self)
        )
    _check_like("q_self", q_self, q)
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
        _scale(scale, q),
        impl,
    )
    return results if return_lse else results[:2]


def _named(
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


def _check_queries(argument: str, q: Tensor, tree: BroadcastTree, level: str) -> None:
    tree.structure.at("level", level)
    if q.dtype not in _FLOATS:
        raise TypeError(f"{argument} must be float64, float32, float16 or bfloat16; got {q.dtype}")
    if q.dim() != 4 or q.shape[3] == 0:
        raise TreeError(argument, "must have shape [rows, n_seed, H, D], D > 0", _shape(q))
    tree.check(argument, q, level)


def _checked(name: str, memory: Memory, q: Tensor, tree: BroadcastTree) -> Memory:
    """The memory with lengths and offsets of a dtype that ops take."""
    at = f"{name}." if name else ""
    k, v, packed = memory.k, memory.v, memory.k.dim() == 3
    if k.dim() not in (3, 4):
        rule = "must have shape [rows, S, Hkv, D], or packed [total, Hkv, D]"
        raise TreeError(f"{at}k", rule, _shape(k))
    for argument, x in (("k", k), ("v", v)):
        _check_like(at + argument, x, q)
        if not packed:
            tree.check(at + argument, x, memory.level)
    if v.shape[:-1] != k.shape[:-1]:
        raise TreeError(f"{at}v", f"must have shape [{_sizes(k.shape[:-1])}, Dv]", _shape(v))
    heads, dim = q.shape[2:]
    if k.shape[-1] != dim:
        raise TreeError(f"{at}k", f"must be {dim} wide, as the queries are", _shape(k))
    if k.shape[-2] == 0 or heads % k.shape[-2]:
        rule = f"must have a number of heads that divides the queries' {heads}"
        raise TreeError(f"{at}k", rule, f"{k.shape[-2]} of shape {_shape(k)}")
    _check_bias_and_mask(at, memory, heads, q)
    if packed:
        if memory.offsets is None or memory.lengths is not None:
            raise TreeError(f"{at}k", "must come with offsets (not lengths) if packed", _shape(k))
        return replace(memory, offsets=_checked_offsets(f"{at}offsets", memory, tree))
    if memory.offsets is not None:
        raise TreeError(f"{at}k", "must be packed, [total, Hkv, D], with offsets", _shape(k))
    return replace(memory, lengths=_checked_lengths(f"{at}lengths", memory, tree))


def _check_bias_and_mask(at: str, memory: Memory, heads: int, q: Tensor) -> None:
    places = memory.k.shape[:-2]
    bias, mask = memory.bias, memory.mask
    if bias is not None:
        if bias.dtype not in _FLOATS:
            names = "float64, float32, float16 or bfloat16"
            raise TypeError(f"{at}bias must be {names}; got {bias.dtype}")
        if bias.shape not in (places, (*places, heads)):
            rule = f"must have shape [{_sizes(places)}] or [{_sizes(places)}, {heads}]"
            raise TreeError(f"{at}bias", rule, _shape(bias))
        _check_device(f"{at}bias", bias, q)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"{at}mask must be bool; got {mask.dtype}")
        if mask.shape != places:
            raise TreeError(f"{at}mask", f"must have shape [{_sizes(places)}]", _shape(mask))
        _check_device(f"{at}mask", mask, q)


def _checked_lengths(argument: str, memory: Memory, tree: BroadcastTree) -> Tensor | None:
    lengths = memory.lengths
    if lengths is None:
        return None
    _check_integers(argument, lengths, tree.capacity(memory.level), memory, tree)
    longest = memory.k.shape[1]
    # Dead rows may hold anything.
    live = lengths[: tree.rows(memory.level)] if _readable(lengths) else None
    if live is not None and live.numel():
        low, high = (int(x) for x in torch.aminmax(live))
        if low < 0 or high > longest:
            rule = f"must lie in 0 ... {longest}, the padded length"
            raise TreeError(argument, rule, str(low if low < 0 else high))
    return _as_index(lengths)


def _checked_offsets(argument: str, memory: Memory, tree: BroadcastTree) -> Tensor:
    offsets = memory.offsets
    assert offsets is not None
    _check_integers(argument, offsets, tree.capacity(memory.level) + 1, memory, tree)
    total = memory.k.shape[0]
    if _readable(offsets):
        live = offsets[: tree.rows(memory.level) + 1].to(torch.int64)
        if bool((live.diff() < 0).any()):
            at = int((live.diff() < 0).nonzero()[0])
            got = f"{int(live[at])}, {int(live[at + 1])} at position {at}"
            raise TreeError(argument, "must not decrease", got)
        if int(live[0]) < 0 or int(live[-1]) > total:
            got = f"{int(live[0])} ... {int(live[-1])}"
            raise TreeError(argument, f"must lie in 0 ... {total}, the length of k", got)
    return _as_index(offsets)


def _check_integers(
    argument: str, x: Tensor, entries: int, memory: Memory, tree: BroadcastTree
) -> None:
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{argument} must be integers; got {x.dtype}")
    if x.dim() != 1 or x.shape[0] != entries:
        rule = f"must have shape [{entries}] for level {memory.level!r}"
        raise TreeError(argument, rule, _shape(x))
    _check_device(argument, x, memory.k)


def _readable(x: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device or breaking a trace."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and type(x) is Tensor


def _as_index(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.int32, torch.int64) else x.to(torch.int32)


def _check_like(argument: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"{argument} must be {q.dtype}, as q is; got {x.dtype}")
    _check_device(argument, x, q)


def _check_device(argument: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise TreeError(argument, f"must be on the tree's device {q.device}", str(x.device))


def _check_plan(plan: Plan, tree: BroadcastTree, level: str) -> None:
    if plan.op != "target_attention" or plan.level != level:
        rule = f"must be made for target_attention at level {level!r}"
        raise TreeError("plan", rule, f"{plan.op} at level {plan.level!r}")
    if not torch.compiler.is_compiling() and plan.rows != tree.rows(level):
        rule = f"must be of a tree with {tree.rows(level)} rows at level {level!r}"
        raise TreeError("plan", rule, f"one with {plan.rows}")


def _scale(scale: float | None, q: Tensor) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


def _sizes(shape: Sequence[Any]) -> str:
    return ", ".join(map(str, shape))


def _shape(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"
