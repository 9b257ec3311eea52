"""`Memory`, the keys and values of one level, and what is checked of it at the public edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.tree import BroadcastTree

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
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


def checked_memory(name: str, memory: Memory, q: Tensor, tree: BroadcastTree) -> Memory:
    """The memory with lengths and offsets of a dtype that ops take."""
    at = f"{name}." if name else ""
    k, v, packed = memory.k, memory.v, memory.k.dim() == 3
    if k.dim() not in (3, 4):
        rule = "must have shape [rows, S, Hkv, D], or packed [total, Hkv, D]"
        raise TreeError(f"{at}k", rule, shape_of(k))
    for argument, x in (("k", k), ("v", v)):
        check_like(at + argument, x, q)
        if not packed:
            tree.check(at + argument, x, memory.level)
    if v.shape[:-1] != k.shape[:-1]:
        raise TreeError(f"{at}v", f"must have shape [{_sizes(k.shape[:-1])}, Dv]", shape_of(v))
    heads, dim = q.shape[2:]
    if k.shape[-1] != dim:
        raise TreeError(f"{at}k", f"must be {dim} wide, as the queries are", shape_of(k))
    if k.shape[-2] == 0 or heads % k.shape[-2]:
        rule = f"must have a number of heads that divides the queries' {heads}"
        raise TreeError(f"{at}k", rule, f"{k.shape[-2]} of shape {shape_of(k)}")
    _check_bias_and_mask(at, memory, heads, q)
    if packed:
        if memory.offsets is None or memory.lengths is not None:
            raise TreeError(f"{at}k", "must come with offsets (not lengths) if packed", shape_of(k))
        return replace(memory, offsets=checked_offsets(f"{at}offsets", memory, tree))
    if memory.offsets is not None:
        raise TreeError(f"{at}k", "must be packed, [total, Hkv, D], with offsets", shape_of(k))
    return replace(memory, lengths=checked_lengths(f"{at}lengths", memory, tree))


def _check_bias_and_mask(at: str, memory: Memory, heads: int, q: Tensor) -> None:
    places = memory.k.shape[:-2]
    bias, mask = memory.bias, memory.mask
    if bias is not None:
        if bias.dtype not in FLOATS:
            names = "float64, float32, float16 or bfloat16"
            raise TypeError(f"{at}bias must be {names}; got {bias.dtype}")
        if bias.shape not in (places, (*places, heads)):
            rule = f"must have shape [{_sizes(places)}] or [{_sizes(places)}, {heads}]"
            raise TreeError(f"{at}bias", rule, shape_of(bias))
        _check_device(f"{at}bias", bias, q)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"{at}mask must be bool; got {mask.dtype}")
        if mask.shape != places:
            raise TreeError(f"{at}mask", f"must have shape [{_sizes(places)}]", shape_of(mask))
        _check_device(f"{at}mask", mask, q)


def checked_lengths(argument: str, memory: Memory, tree: BroadcastTree) -> Tensor | None:
    """Lengths in a dtype that ops take; their argument's name is for messages."""
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


def checked_offsets(argument: str, memory: Memory, tree: BroadcastTree) -> Tensor:
    """Likewise the offsets of packed entries."""
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
        raise TreeError(argument, rule, shape_of(x))
    _check_device(argument, x, memory.k)


def _readable(x: Tensor) -> bool:
    """Whether its values can be looked at without waiting for a device or breaking a trace."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and type(x) is Tensor


def _as_index(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.int32, torch.int64) else x.to(torch.int32)


def check_like(argument: str, x: Tensor, q: Tensor) -> None:
    """Raises unless `x` has the dtype of the queries and is on their device."""
    if x.dtype != q.dtype:
        raise TypeError(f"{argument} must be {q.dtype}, as q is; got {x.dtype}")
    _check_device(argument, x, q)


def _check_device(argument: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise TreeError(argument, f"must be on the tree's device {q.device}", str(x.device))


def _sizes(shape: Sequence[Any]) -> str:
    return ", ".join(map(str, shape))


def shape_of(x: Tensor) -> str:
    """A tensor's shape, for messages."""
    return f"shape {tuple(x.shape)}"
