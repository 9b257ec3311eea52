"""The Triton path of `target_attention`: broadcast-free, no wait for the device, for every GPU.

Contract 4 holds because nothing that reaches a row's bits depends on other requests: the keys of a
row are walked in blocks counted from its first key, whatever tile it is in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import multiprocessors
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import guard, refused
from ikbo_tree.kernels.target_attention import triton_backward
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_backward import Sizes
from ikbo_tree.kernels.target_attention.triton_chunks import forward_chunks
from ikbo_tree.kernels.target_attention.triton_device import LOG2E
from ikbo_tree.kernels.target_attention.triton_forward import forward_rows
from ikbo_tree.kernels.target_attention.triton_groups import (
    Group,
    dense,
    descriptors,
    groups,
)

WIDEST = 256
"""Head dims from 1 to this; wider ones would not leave room in registers."""
WORKSPACE = 1 << 28
"""Bytes of float32 states up to which programs share a tile's chunks."""


def unsupported(
    device: torch.device,
    q: Tensor,
    memories: Sequence[Memory],
    live: Tensor | None,
    scale: float,
) -> str | None:
    """Why these kernels cannot take a call, or None."""
    reason = refused(device, q.dtype)
    if reason is not None:
        return reason
    width, value_width = q.shape[-1], memories[0].v.shape[-1]
    if max(width, value_width) > WIDEST or value_width == 0:
        return f"head dims must be 1 to {WIDEST}; got {width} and {value_width}"
    if q.shape[0] * q.shape[1] >= 2**31:
        return f"it counts query rows in 32 bits; got {q.shape[0]} * {q.shape[1]}"
    return None


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o in q's dtype, lse in float32)."""
    sizes = Sizes(q, memories[0].v.shape[-1], scale)
    o = q.new_empty((*q.shape[:-1], sizes.DV))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    q = dense(q)
    launches = groups(memories, sizes.n_seed)
    part: tuple[Tensor | None, Tensor | None] = (None, None)
    if len(launches) > 1:
        part = (torch.empty_like(o, dtype=torch.float32), torch.empty_like(lse))
    with guard(q):
        for i, group in enumerate(launches):
            flags = {"FIRST": i == 0, "LAST": i == len(launches) - 1}
            results = (o, lse, *part)
            if sizes.n_seed < FUSED_SEEDS:
                launch_chunks(q, results, group, live, sizes, flags)
            else:
                _rows(q, results, group, live, sizes, flags)
    return o, lse


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
    """Gradients of those of q, *k, *v, *bias that are needed, each rounded once."""
    inputs = [q, *(m.k for m in memories), *(m.v for m in memories)]
    inputs += [m.bias for m in memories if m.bias is not None]
    if o.numel() == 0:
        wanted = zip(inputs, needs, strict=True)
        return [x.new_zeros(x.shape) for x, needed in wanted if needed]
    count = len(memories)
    bias_needs = iter(needs[1 + 2 * count :])
    each = [
        (needs[1 + i], needs[1 + count + i], m.bias is not None and next(bias_needs))
        for i, m in enumerate(memories)
    ]
    sizes = Sizes(q, memories[0].v.shape[-1], scale)
    with guard(q):
        rows = triton_backward.Rows.of(q, grad_o, o, lse, grad_lse)
        exact = needs[0] or any(k or bias for k, _, bias in each)
        dq = triton_backward.queries(rows, memories, live, sizes, needs[0], exact)
        found = [
            triton_backward.keys(rows, m, live, sizes, needed)
            if any(needed)
            else (None, None, None)
            for m, needed in zip(memories, each, strict=True)
        ]
    columns = zip(*found, strict=True)
    return [x for x in (dq, *(x for column in columns for x in column)) if x is not None]


def _rows(
    q: Tensor,
    results: tuple[Tensor | None, ...],
    group: Group,
    live: Tensor | None,
    sizes: Sizes,
    flags: dict[str, bool],
) -> None:
    tile = sizes.config.forward
    M = sizes.tile_rows(group, tile.rows)
    launch(
        forward_rows,
        (group.tile_count(sizes.rows, sizes.n_seed, M) * sizes.heads,),
        q,
        *results,
        group.tiles.order,
        group.tiles.offsets,
        live,
        group.arguments(sizes.heads),
        *group.maps(),
        *descriptors(group, tile),
        *group.sizes(),
        *q.stride()[:3],
        sizes.rows,
        group.segments(sizes.rows),
        sizes.n_seed,
        sizes.heads,
        abs(sizes.scale) * LOG2E.value,
        COUNT=len(group.memories),
        **sizes.widths(),
        M=M,
        N=tile.keys,
        **flags,
        RUNS=group.runs,
        NEGATIVE=sizes.scale < 0,
        PRECISION=sizes.precision,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def launch_chunks(
    q: Tensor,
    results: tuple[Tensor | None, ...],
    group: Group,
    live: Tensor | None,
    sizes: Sizes,
    flags: dict[str, bool],
) -> None:
    """Attends from segments of few query rows, whose keys are cut into chunks.

    With `sizes.config.few` < 0, longer segments are left to others. results: o, lse and, float32,
    what an earlier launch leaves for a later one. flags: FIRST and LAST.
    """
    config = sizes.config
    tile, chunk = config.chunks, config.chunk
    M = sizes.tile_rows(group, tile.rows)
    programs = group.tile_count(sizes.rows, sizes.n_seed, M) * sizes.heads
    slots = sum(-(-size // chunk) for size in group.sizes())
    splits, states = _splits(q, programs, slots, M * (sizes.DVP + 2) * 4)
    for shared in (splits,) if splits == 1 else (splits, 0):
        launch(
            forward_chunks,
            (programs, max(shared, 1)),
            q,
            *results,
            states,
            group.tiles.order,
            group.tiles.offsets,
            live,
            group.arguments(sizes.heads),
            *group.maps()[::3],
            *group.sizes(),
            *q.stride()[:3],
            sizes.rows,
            group.segments(sizes.rows),
            sizes.n_seed,
            sizes.heads,
            slots,
            shared,
            abs(sizes.scale) * LOG2E.value,
            COUNT=len(group.memories),
            **sizes.widths(),
            M=M,
            N=tile.keys,
            CHUNK=chunk,
            FEW=config.few,
            **flags,
            NEGATIVE=sizes.scale < 0,
            PRECISION=sizes.precision,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


def _splits(q: Tensor, programs: int, slots: int, bytes_each: int) -> tuple[int, Tensor]:
    """How many programs share a tile, and room for the states they leave.

    Makes no difference to any bits.
    """
    wanted = 4 * multiprocessors(q.device)
    splits = min(slots, -(-wanted // programs)) if 2 * programs < wanted else 1
    bytes_all = programs * slots * bytes_each
    if splits < 2 or bytes_all > WORKSPACE:
        return 1, q.new_empty(1, dtype=torch.float32)
    return splits, q.new_empty(bytes_all // 4, dtype=torch.float32)
