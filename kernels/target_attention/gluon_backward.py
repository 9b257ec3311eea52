"""Gradients of the Hopper path of `target_attention`: launches of its two kernels.

First that of the queries, which also finds each row's exact delta (see triton_queries), then for
each memory that of its keys and values. Either part is left to the Triton path where it has no
tiles: with head dims 192 and 256, or fewer than FEWEST query rows a row, which may leave tiles
empty; and delta alone, where the queries need no gradient. This follows from sizes of rows, never
from how many there are.

Contract 4 holds as in the forward: a row's keys, and a key's query rows, are walked in an order
that follows from how many there are, and pieces of long segments are added first to last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import multiprocessors
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import guard
from ikbo_tree.kernels.target_attention import triton_backward
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS
from ikbo_tree.kernels.target_attention.gluon_backward_config import KEYS, QUERIES, GradientTile
from ikbo_tree.kernels.target_attention.gluon_keys_device import BLOCK, KEYS_TILE
from ikbo_tree.kernels.target_attention.gluon_keys_device import HALF as HALF_KEYS
from ikbo_tree.kernels.target_attention.gluon_keys_kernel import key_gradients
from ikbo_tree.kernels.target_attention.gluon_keys_pieces import add_pieces
from ikbo_tree.kernels.target_attention.gluon_operands import (
    blocks_descriptor,
    counters,
    keys_descriptor,
)
from ikbo_tree.kernels.target_attention.gluon_queries_device import HALF, TILE
from ikbo_tree.kernels.target_attention.gluon_queries_kernel import query_gradients
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_backward import WORKSPACE, Rows, Sizes
from ikbo_tree.kernels.target_attention.triton_device import LOG2E
from ikbo_tree.kernels.target_attention.triton_groups import (
    MOST,
    Group,
    extent,
    groups,
    own_tiles,
    owners,
)

QUERIES_HERE = True
"""The queries' gradient is computed by the kernel of this path; else by Triton's."""
KEYS_HERE = True
"""Likewise gradients of keys and values."""
FEWEST = FUSED_SEEDS
"""Query rows a row from which on either kernel is used."""
EARLY = True
"""See `key_gradients`; makes no difference to any bits."""


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
    """Gradients of those of q, *k, *v that are needed, each rounded once.

    Args and result as in `triton_kernel.backward`, for calls that the Hopper forward takes: no
    bias, no mask, query rows in the order of their ancestors, up to four memories.
    """
    count = len(memories)
    inputs = [q, *(m.k for m in memories), *(m.v for m in memories)]
    if o.numel() == 0:
        wanted = zip(inputs, needs, strict=True)
        return [x.new_zeros(x.shape) for x, needed in wanted if needed]
    sizes = Sizes(q, o.shape[-1], scale)
    with guard(q):
        rows = Rows.of(q, grad_o, o, lse, grad_lse)
        counter = counters(q.device)
        if needs[0] and QUERIES_HERE and _has_tiles(QUERIES, sizes):
            found = [queries(rows, memories, live, sizes, counter)]
        else:
            exact = needs[0] or any(needs[1 : 1 + count])
            dq = triton_backward.queries(rows, memories, live, sizes, needs[0], exact)
            found = [] if dq is None else [dq]
        pairs = [
            _keys(rows, m, live, sizes, counter, (needs[1 + i], needs[1 + count + i]))
            for i, m in enumerate(memories)
        ]
    columns = zip(*pairs, strict=True)
    return found + [x for column in columns for x in column if x is not None]


def _has_tiles(table: dict[int, GradientTile], sizes: Sizes) -> bool:
    return sizes.D in table and sizes.n_seed >= FEWEST


def queries(
    rows: Rows, memories: Sequence[Memory], live: Tensor | None, sizes: Sizes, counter: Tensor
) -> Tensor:
    """Writes `rows.stats`, and returns the gradient of q.

    Args:
        rows: the query rows.
        memories: up to four.
        live: [1], live query rows, or None.
        sizes: of the call.
        counter: see `counters`.
    """
    (group,) = groups(memories, FUSED_SEEDS)
    dq = torch.empty(rows.q.shape, dtype=rows.q.dtype, device=rows.q.device)
    items = group.tile_count(sizes.rows, sizes.n_seed, TILE.value) * sizes.heads
    far = torch.empty(rows.stats.shape[1:], dtype=torch.int8, device=dq.device)
    again = torch.zeros(items, dtype=torch.int32, device=dq.device)
    tile = QUERIES[sizes.D]
    descriptors = [blocks_descriptor(x, HALF.value) for x in (rows.q, rows.do, rows.o, dq)]
    for memory in group.memories:
        descriptors += [keys_descriptor(x, tile.keys) for x in (memory.k, memory.v)]
    missing = [None] * (2 * (MOST - len(group.memories)))
    for second in (False, True):
        launch(
            query_gradients,
            (min(multiprocessors(dq.device), items),),
            *descriptors,
            *missing,
            dq,
            rows.lse,
            rows.dlse,
            rows.stats,
            far,
            again,
            counter,
            *_query_maps(group, live),
            sizes.rows,
            group.segments(sizes.rows),
            sizes.n_seed,
            items,
            rows.stats.stride(1),
            sizes.scale,
            sizes.scale * LOG2E.value,
            COUNT=len(group.memories),
            H=sizes.heads,
            D=sizes.D,
            BN=tile.keys,
            STAGES=tile.stages,
            GROUPS=tuple(sizes.heads // m.k.shape[-2] for m in group.memories),
            PACKED=sum(m.packed << i for i, m in enumerate(group.memories)),
            RUNS=group.runs,
            AGAIN=second,
            SHARED=tile.shared,
            CONSUMER_REGISTERS=tile.consumer_registers,
            PRODUCER_REGISTERS=tile.producer_registers,
            num_warps=4,
        )
    return dq


def _query_maps(group: Group, live: Tensor | None) -> list[Tensor | int | None]:
    offsets = group.tiles.offsets
    return [offsets, live if offsets is None else None, *group.maps(), *group.sizes()]


def _keys(
    rows: Rows,
    memory: Memory,
    live: Tensor | None,
    sizes: Sizes,
    counter: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a memory's k and v, those that are needed."""
    if not any(needs):
        return None, None
    if KEYS_HERE and _has_tiles(KEYS, sizes):
        dk, dv = keys(rows, memory, live, sizes, counter)
        return dk if needs[0] else None, dv if needs[1] else None
    found = triton_backward.keys(rows, memory, live, sizes, (*needs, False))
    return found[0], found[1]


def keys(
    rows: Rows, memory: Memory, live: Tensor | None, sizes: Sizes, counter: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a memory's k and v.

    Args:
        rows: the query rows, after `queries`.
        memory: the memory.
        live: [1], live query rows, or None.
        sizes: of the call.
        counter: see `counters`.
    """
    k, v, config, tile = memory.k, memory.v, sizes.config, KEYS[sizes.D]
    make = torch.zeros if memory.packed else torch.empty
    dk, dv = (make(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    if k.numel() == 0:
        return dk, dv
    kv_heads = k.shape[-2]
    items = own_tiles(memory, KEYS_TILE.value) * kv_heads
    splits, part = _share(k, sizes, items)
    offsets = memory.offsets
    maps = (offsets, live if offsets is None else None, extent(memory))
    counts = (k.shape[0 if memory.packed else 1], sizes.rows, owners(memory), sizes.n_seed)
    launch(
        key_gradients,
        (min(multiprocessors(k.device), items * splits),),
        *(blocks_descriptor(x, BLOCK.value) for x in (rows.q, rows.do)),
        *(keys_descriptor(x, HALF_KEYS.value) for x in (k, v, dk, dv)),
        dk,
        dv,
        part,
        rows.stats,
        counter,
        *maps,
        *counts,
        items * splits,
        splits,
        rows.stats.stride(1),
        sizes.scale,
        sizes.scale * LOG2E.value,
        SHARED=sizes.heads // kv_heads,
        HKV=kv_heads,
        D=sizes.D,
        STAGES=tile.stages,
        PACKED=memory.packed,
        PIECE=config.piece,
        PIECES=config.pieces,
        EARLY=EARLY,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        num_warps=4,
    )
    launch(
        add_pieces,
        (items,),
        dk,
        dv,
        part,
        *maps,
        *counts,
        kv_heads,
        sizes.scale,
        D=sizes.D,
        DP=sizes.DP,
        N=KEYS_TILE.value,
        M=BLOCK.value,
        PACKED=memory.packed,
        PIECE=config.piece,
        PIECES=config.pieces,
        num_warps=4,
        when=splits > 1,
    )
    return dk, dv


def _share(k: Tensor, sizes: Sizes, items: int) -> tuple[int, Tensor]:
    """How many blocks share an item's pieces, and their room for sums.

    Makes no difference to any bits.
    """
    running = multiprocessors(k.device)
    slot = 2 * KEYS_TILE.value * sizes.DP
    splits, slots = 1, 0
    if sizes.rows * sizes.n_seed > sizes.config.piece:
        pieces = sizes.config.pieces
        few = items < running and items * pieces * slot * 4 <= WORKSPACE
        splits = pieces if few else 1
        slots = items * splits if few else min(items, running)
    part = torch.empty(max(1, slots * slot), dtype=torch.float32, device=k.device)
    return splits, part


__all__ = ["backward"]
