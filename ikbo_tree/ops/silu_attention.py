"""Pointwise attention of fine rows to keys and values that their ancestors own (HSTU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common import dispatch
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.silu_attention.op import silu_attention as _silu_attention
from ikbo_tree.ops.attention import check_queries, default_scale, named_memories
from ikbo_tree.ops.memories import Memory, checked_memory, shape_of
from ikbo_tree.tree import BroadcastTree


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
        impl: `"auto"`, `"reference"`, `"torch"`, which waits for the device on CUDA, or
            `"triton"`.

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
    factors, factor = None, 1.0
    if isinstance(length, Tensor) or length is None:
        over = _keys_of_rows(checked, tree, level).clamp_(min=1) if length is None else length
        factors = over.to(accumulator(q.dtype)).reciprocal()
    else:
        factor = 1.0 / length
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
        factors,
        factor,
        default_scale(scale, q),
        impl,
    )
    return o


def _check_length(length: float | Tensor | None, tree: BroadcastTree, level: str) -> None:
    if isinstance(length, Tensor):
        tree.check("length", length, level)
        if length.dim() != 1:
            raise TreeError("length", "must be a number or have shape [rows]", shape_of(length))
        if length.requires_grad:
            raise TreeError("length", "must not require a gradient", "one that does")
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
