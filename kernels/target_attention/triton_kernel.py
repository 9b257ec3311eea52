"""The Triton path of `target_attention`: broadcast-free, no wait for the device, for every GPU.

Contract 4 holds because nothing that reaches a row's bits depends on other requests: the keys of a
row are walked in blocks counted from its first key, whatever tile it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import architecture, power_of_two
from ikbo_tree.kernels.common.triton_lib import dot_precision, guard, refused
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS, Config, Tile, attention_config
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_chunks import combine_chunks, forward_chunks
from ikbo_tree.kernels.target_attention.triton_device import LOG2E
from ikbo_tree.kernels.target_attention.triton_forward import forward_rows
from ikbo_tree.kernels.target_attention.triton_groups import (
    Group,
    dense,
    descriptor,
    groups,
    processors,
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


class Sizes:
    """What all launches of a call have in common."""

    def __init__(self, q: Tensor, memories: Sequence[Memory], scale: float) -> None:
        self.rows, self.n_seed, self.heads, self.D = q.shape
        self.DV = memories[0].v.shape[-1]
        self.DP, self.DVP = (max(16, power_of_two(width)) for width in (self.D, self.DV))
        self.scale = scale
        self.precision = dot_precision(q.dtype)
        arch = architecture(q.device)
        self.config: Config = attention_config(arch, q.element_size(), max(self.DP, self.DVP))

    def tile_rows(self, group: Group, tile: Tile) -> int:
        """Query rows of a tile: no more than a segment has where each row is one."""
        if group.tiles.offsets is not None:
            return tile.rows
        return min(tile.rows, max(16, power_of_two(self.n_seed)))

    def widths(self) -> dict[str, int]:
        """Constants of every kernel."""
        return {"D": self.D, "DV": self.DV, "DP": self.DP, "DVP": self.DVP}


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o in q's dtype, lse in float32)."""
    sizes = Sizes(q, memories, scale)
    o = q.new_empty((*q.shape[:-1], sizes.DV))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    q = dense(q)
    launches = groups(memories, sizes.n_seed)
    part = (None, None)
    if len(launches) > 1:
        part = (torch.empty_like(o, dtype=torch.float32), torch.empty_like(lse))
    with guard(q):
        for i, group in enumerate(launches):
            flags = {"FIRST": i == 0, "LAST": i == len(launches) - 1}
            results = (o, lse, *part)
            if sizes.n_seed < FUSED_SEEDS:
                _chunks(q, results, group, live, sizes, flags)
            else:
                _rows(q, results, group, live, sizes, flags)
    return o, lse


def _rows(
    q: Tensor,
    results: tuple[Tensor | None, ...],
    group: Group,
    live: Tensor | None,
    sizes: Sizes,
    flags: dict[str, bool],
) -> None:
    tile = sizes.config.forward
    M = sizes.tile_rows(group, tile)
    forward_rows[(group.tile_count(sizes.rows, sizes.n_seed, M) * sizes.heads,)](
        q,
        *results,
        group.tiles.order,
        group.tiles.offsets,
        live,
        group.arguments(sizes.heads),
        *_descriptors(group, tile, sizes),
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


def _descriptors(group: Group, tile: Tile, sizes: Sizes) -> list[Any]:
    found: list[Any] = []
    for memory in group.memories:
        usable = tile.descriptors and memory.mask is None
        for x, width in ((memory.k, sizes.D), (memory.v, sizes.DV)):
            found.append(descriptor(dense(x), tile.keys, width) if usable else None)
    return found + [None] * (8 - len(found))


def _chunks(
    q: Tensor,
    results: tuple[Tensor | None, ...],
    group: Group,
    live: Tensor | None,
    sizes: Sizes,
    flags: dict[str, bool],
) -> None:
    config = sizes.config
    tile, chunk = config.chunks, config.chunk
    M = sizes.tile_rows(group, tile)
    programs = group.tile_count(sizes.rows, sizes.n_seed, M) * sizes.heads
    slots = sum(-(-size // chunk) for size in group.sizes())
    splits, states = _splits(q, programs, slots, M * (sizes.DVP + 2) * 4)
    route = (group.tiles.order, group.tiles.offsets, live)
    memories = (group.arguments(sizes.heads), *group.sizes())
    counts = (sizes.rows, group.segments(sizes.rows), sizes.n_seed, sizes.heads)
    constants = {
        "COUNT": len(group.memories),
        "DV": sizes.DV,
        "DVP": sizes.DVP,
        "M": M,
        "CHUNK": chunk,
        "FEW": config.few,
        **flags,
    }
    forward_chunks[(programs, splits)](
        q,
        *results,
        states,
        *route,
        *memories,
        *q.stride()[:3],
        *counts,
        slots,
        splits,
        abs(sizes.scale) * LOG2E.value,
        D=sizes.D,
        DP=sizes.DP,
        N=tile.keys,
        NEGATIVE=sizes.scale < 0,
        PRECISION=sizes.precision,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **constants,
    )
    if splits > 1:
        combine_chunks[(programs,)](
            *results, states, *route, *memories, *counts, slots, num_warps=tile.num_warps, **constants
        )


def _splits(q: Tensor, programs: int, slots: int, bytes_each: int) -> tuple[int, Tensor]:
    """How many programs share a tile, and room for the states they leave.

    Makes no difference to any bits.
    """
    wanted = 4 * processors(q.device)
    splits = min(slots, -(-wanted // programs)) if 2 * programs < wanted else 1
    bytes_all = programs * slots * bytes_each
    if splits < 2 or bytes_all > WORKSPACE:
        return 1, q.new_empty(1, dtype=torch.float32)
    return splits, q.new_empty(bytes_all // 4, dtype=torch.float32)
