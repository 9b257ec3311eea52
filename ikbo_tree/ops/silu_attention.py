"""Pointwise attention of fine rows to keys and values that their ancestors own (HSTU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.target_attention.memories import collect
from ikbo_tree.ops.attention import check_queries, default_scale, named_memories
from ikbo_tree.ops.memories import Memory, checked_memory, shape_of
from ikbo_tree.tree import BroadcastTree

IMPLEMENTATIONS = dispatch.Implementations(
    "silu_attention", __package__, {"reference": "silu_reference", "torch": "silu_torch"}
)


def silu_attention(
    q: Tensor,
    memories: Mapping[str, tuple[Tensor, Tensor]] | Sequence[Memory],
    *,
    tree: BroadcastTree,
    level: str,
    length: float | Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention by `silu` of each score in place of a softmax: `sum of silu(q . k) v / length`.

    The pointwise aggregated attention of HSTU (Zhai et al., arXiv 2402.17152), over the keys and
    values of all memories together. They stay at their own level, as in `target_attention`. A bias
    by distance or time goes into `Memory.bias`.

    Args:
        q: [rows of `level`, n_seed, H, D], any strides.
        memories: see `target_attention`. A bias must be finite here; `mask` leaves keys out.
        tree: the tree.
        level: the level of the queries.
        length: what sums are divided by: a number, the longest history in HSTU, or [rows of
            `level`]. None: the number of keys that a row attends to, in all memories.
        scale: factor of the scores; default 1 / sqrt(D).
        impl: `"auto"`, `"reference"` or `"torch"`, which waits for the device on CUDA.

    Returns:
        [rows of `level`, n_seed, H, Dv] in `q`'s dtype, computed in float32 (float64 for float64)
        and rounded once. A row with nothing to attend to has 0 and zero gradients. Dead rows are
        zero. Differentiable once, by q, k, v and bias.

    Raises:
        TreeError: unknown names, a memory not above `level`; shapes, rows, values or devices that
            do not fit.
        TypeError: dtypes that do not fit.
        UnsupportedError: `impl` is another one.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> k, v = torch.ones(2, 2, 1, 1), torch.tensor([[1.0, 2.0], [3.0, 5.0]]).view(2, 2, 1, 1)
    >>> q = torch.tensor([0.0, 1.0, 1.0]).view(3, 1, 1, 1)
    >>> silu_attention(q, {"user": (k, v)}, tree=tree, level="item").flatten()
    tensor([0.0000, 1.0966, 2.9242])
    """
    dispatch.checked_name(impl)
    check_queries("q", q, tree, level)
    named = named_memories(memories)
    tree.chain("memories", [memory.level for memory in named.values()], level)
    checked = [checked_memory(name, memory, q, tree) for name, memory in named.items()]
    first = named[next(iter(named))]
    for name, memory in named.items():
        if memory.v.shape[-1] != first.v.shape[-1]:
            width = f"must be {first.v.shape[-1]} wide, like the first memory's"
            raise TreeError(f"{name}.v", width, shape_of(memory.v))
    _check_length(length, tree, level)
    routes = [tree.route(level, memory.level) for memory in checked]
    biases = [(i, m.bias) for i, m in enumerate(checked) if m.bias is not None]
    o: Tensor = _silu_attention(
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
    if length is None:
        length = _keys_of_rows(checked, tree, level).clamp_(min=1)
    if isinstance(length, Tensor):
        # Dead rows may hold anything, 0 as well.
        length = zero_dead_rows(length.to(o.dtype), tree.live(level)).view(-1, 1, 1, 1)
    return zero_dead_rows((o / length).to(q.dtype), tree.live(level))


def _check_length(length: float | Tensor | None, tree: BroadcastTree, level: str) -> None:
    if isinstance(length, Tensor):
        tree.check("length", length, level)
        if length.dim() != 1:
            raise TreeError("length", "must be a number or have shape [rows]", shape_of(length))
    elif length is not None and length <= 0:
        raise TreeError("length", "must be positive", str(length))


def _keys_of_rows(memories: Sequence[Memory], tree: BroadcastTree, level: str) -> Tensor:
    """[rows of `level`] float32: keys that each row attends to."""
    total = torch.zeros(tree.capacity(level), device=tree.device)
    if total.shape[0] == 0:
        return total
    for memory in memories:
        count = _keys_owned(memory, tree.capacity(memory.level))
        if count.shape[0]:
            index = tree.ancestors(level, of=memory.level)
            total = total + count.to(total.dtype).index_select(0, index)
    return total


def _keys_owned(memory: Memory, rows: int) -> Tensor:
    """[rows of the memory's level]."""
    k, mask = memory.k, memory.mask
    if memory.offsets is not None:
        bounds = memory.offsets.clamp(0, k.shape[0])
        if mask is not None:
            before = torch.cat([mask.new_zeros(1), mask]).cumsum(0)
            bounds = before.index_select(0, bounds)
        return bounds.diff().clamp(min=0)
    lengths = memory.lengths
    if mask is None:
        if lengths is None:
            return torch.full((rows,), k.shape[1], device=k.device)
        return lengths.clamp(0, k.shape[1])
    if lengths is not None:
        mask = mask & (torch.arange(k.shape[1], device=k.device) < lengths.unsqueeze(1))
    return mask.sum(1)


_ARGUMENTS = (
    "Tensor q, Tensor[] k, Tensor[] v, Tensor[] bias, int[] bias_of, Tensor?[] extent,"
    " Tensor?[] mask, Tensor?[] index, Tensor?[] offsets, Tensor?[] order, Tensor? live,"
    " float scale"
)


def _forward(q: Tensor, *rest: Any) -> Tensor:
    *lists, live, scale, impl = rest
    memories = collect(*lists)
    o: Tensor = IMPLEMENTATIONS.choose(impl, q.device).forward(q, memories, live, scale)
    return o


def _fake(q: Tensor, k: list[Tensor], v: list[Tensor], *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v[0].shape[-1]), dtype=accumulator(q.dtype))


def _run_backward(grad: Tensor, q: Tensor, *rest: Any) -> list[Tensor]:
    *lists, live, scale, needs, impl = rest
    module = IMPLEMENTATIONS.choose(impl, q.device)
    found: list[Tensor] = module.backward(grad, q, collect(*lists), live, scale, needs)
    return found


def _backward_fake(grad: Tensor, *rest: Any) -> list[Tensor]:
    q, k, v, bias, *_, needs, _ = rest
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip((q, *k, *v, *bias), needs, strict=True)
        if needed
    ]


_silu_attention_backward = register(
    "silu_attention_backward",
    f"(Tensor grad, {_ARGUMENTS}, bool[] needs, str impl) -> Tensor[]",
    _run_backward,
    _backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, *lists, live, ctx.scale, impl = inputs
    ctx.lengths = [len(entries) for entries in lists]
    ctx.bias_of = lists[3]
    ctx.save_for_backward(
        q, live, *(x for i, entries in enumerate(lists) if i != 3 for x in entries)
    )
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, live, *tensors = ctx.saved_tensors
    lists: list[list[Any]] = []
    for i, length in enumerate(ctx.lengths):
        if i == 3:
            lists.append(ctx.bias_of)
            continue
        lists.append(list(tensors[:length]))
        tensors = tensors[length:]
    needs_q, *groups = ctx.needs_input_grad[:4]
    needs = [needs_q, *(needed for group in groups for needed in group)]
    found = iter(_silu_attention_backward(grad, q, *lists, live, ctx.scale, needs, ctx.impl))
    dq = next(found) if needs_q else None
    wanted = [[next(found) if needed else None for needed in group] for group in groups]
    return dq, *wanted, *(_no_gradient(entries) for entries in lists[3:]), None, None, None


def _no_gradient(entries: list[Any]) -> list[None] | None:
    # torch.library flattens a list without a None (or an int) in it, and keeps any other whole.
    whole = any(not isinstance(entry, Tensor) for entry in entries)
    return None if whole else [None] * len(entries)


_silu_attention = register(
    "silu_attention",
    f"({_ARGUMENTS}, str impl) -> Tensor",
    _forward,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
