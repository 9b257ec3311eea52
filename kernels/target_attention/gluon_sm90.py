"""The Hopper path of `target_attention`: one persistent, warp-specialised launch, in Gluon.

Contract 4 holds because the keys of a row are walked in an order that follows from how many there
are, whatever tile the row is in and whichever block has that tile. Gradients: see gluon_backward.

With few query rows a row, segments too short to be worth tiles are left to the Triton path's
chunks: two launches, of which each finds out from a segment's own length whether it is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import architecture, multiprocessors
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import INTERPRETED, guard
from ikbo_tree.kernels.target_attention import triton_kernel
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS
from ikbo_tree.kernels.target_attention.gluon_backward import backward
from ikbo_tree.kernels.target_attention.gluon_config import HOPPER
from ikbo_tree.kernels.target_attention.gluon_device import SMALLEST
from ikbo_tree.kernels.target_attention.gluon_kernel import attention_forward
from ikbo_tree.kernels.target_attention.gluon_operands import (
    TYPES,
    aligned,
    counters,
    keys_descriptor,
    rows_descriptor,
)
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_backward import Sizes, folded
from ikbo_tree.kernels.target_attention.triton_device import LOG2E
from ikbo_tree.kernels.target_attention.triton_groups import (
    MOST,
    Group,
    dense,
    groups,
)

TILE = 128
"""Folded query rows of a tile."""
DYNAMIC = True
"""Blocks draw their tiles from a counter; makes no difference to any bits."""
LATE = True
"""Row sums are added up across threads once a tile instead of once a block."""


def unsupported(
    device: torch.device,
    q: Tensor,
    memories: Sequence[Memory],
    live: Tensor | None,
    scale: float,
) -> str | None:
    """Why this kernel cannot take a call, or None."""
    reason = refused(device, q, memories)
    if reason is None and q.shape[1] < FUSED_SEEDS:
        offsets = {None if m.offsets is None else m.offsets.data_ptr() for m in memories}
        if None in offsets or len(offsets) > 1:
            few = f"with fewer than {FUSED_SEEDS} query rows a row"
            reason = f"{few} it takes keys of one level above the queries'; got {q.shape[1]}"
    return reason


def refused(device: torch.device, q: Tensor, memories: Sequence[Memory]) -> str | None:
    """Why no such kernel can take these queries over these memories, or None."""
    if device.type != "cuda" or INTERPRETED or architecture(device) != "sm_90":
        return f"it is for GPUs of compute capability 9.0; the tensors are on {device}"
    if q.dtype not in TYPES:
        return f"it takes float16 and bfloat16; got {q.dtype}"
    width, value_width = q.shape[-1], memories[0].v.shape[-1]
    if width not in HOPPER or value_width != width:
        known = ", ".join(map(str, HOPPER))
        return f"head dims must be equal and one of {known}; got {width} and {value_width}"
    if any(memory.bias is not None or memory.mask is not None for memory in memories):
        return "it takes no bias and no mask"
    if any(memory.order is not None for memory in memories):
        return "query rows must lie in the order of their ancestors: no table, no unsorted tree"
    if len(memories) > MOST:
        return f"it takes up to {MOST} memories; got {len(memories)}"
    entries = [memory.k.shape[0] for memory in memories if memory.packed]
    if max([q.shape[0] * q.shape[1], *entries]) >= 2**31:
        return "it counts query rows and packed keys in 32 bits"
    return None


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o in q's dtype, lse in float32)."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    (group,) = groups(memories, max(q.shape[1], FUSED_SEEDS))
    few = 0
    with guard(q):
        if q.shape[1] < FUSED_SEEDS:
            few = _short_segments(q, o, lse, group, live, scale)
        _launch(folded(q), o, lse, group, live, scale, few)
    return o, lse


def _short_segments(
    q: Tensor, o: Tensor, lse: Tensor, group: Group, live: Tensor | None, scale: float
) -> int:
    """Writes the rows of short segments and dead ones; returns how many rows are few."""
    sizes = Sizes(q, o.shape[-1], scale)
    few = sizes.config.few
    sizes.config = replace(sizes.config, few=-few)
    results = (o, lse, None, None)
    triton_kernel.launch_chunks(
        dense(q), results, group, live, sizes, {"FIRST": True, "LAST": True}
    )
    return few


def _launch(
    q: Tensor, o: Tensor, lse: Tensor, group: Group, live: Tensor | None, scale: float, few: int
) -> None:
    rows, n_seed, heads, width = q.shape
    tile = HOPPER[width]
    items = group.tile_count(rows, n_seed, TILE) * heads
    scale2, negative = factor(scale)
    missing = MOST - len(group.memories)
    # Allocated rows may say that there is no long segment: all is done once it is compiled.
    runs = rows * n_seed > few
    if not runs and _compiled(q, group, negative):
        return
    launch(
        attention_forward,
        (min(multiprocessors(q.device), items),),
        rows_descriptor(aligned(q)),
        rows_descriptor(o),
        *[keys_descriptor(x, tile.keys) for m in group.memories for x in (m.k, m.v)],
        *[None] * (2 * missing),
        o,
        lse,
        counters(q.device) if runs else q.new_empty(2, dtype=torch.int32),
        group.tiles.offsets,
        live if group.tiles.offsets is None else None,
        *group.maps(),
        *group.sizes(),
        rows,
        group.segments(rows),
        n_seed,
        items,
        scale2,
        COUNT=len(group.memories),
        H=heads,
        D=width,
        BN=tile.keys,
        SLOTS=tile.slots,
        GROUPS=tuple(heads // m.k.shape[-2] for m in group.memories),
        PACKED=sum(m.packed << i for i, m in enumerate(group.memories)),
        RUNS=group.runs,
        FEW=few,
        NEGATIVE=negative,
        DYNAMIC=DYNAMIC,
        LATE=LATE,
        CONSUMER_REGISTERS=tile.consumer_registers,
        PRODUCER_REGISTERS=tile.producer_registers,
        num_warps=4,
        when=runs,
    )


_COMPILED: set[tuple[Any, ...]] = set()
"""What calls of few query rows a row have been compiled for: descriptors cost more than a look."""


def _compiled(q: Tensor, group: Group, negative: bool) -> bool:
    """Whether a call came here before for which the same is compiled."""
    facts: list[Any] = [q.device, q.dtype, q.shape[2:], negative, DYNAMIC, LATE]
    for memory in group.memories:
        extent = memory.extent
        facts += [memory.packed, memory.k.shape[-2], None if extent is None else extent.dtype]
    known = tuple(facts) in _COMPILED
    _COMPILED.add(tuple(facts))
    return known and q.is_cuda


def factor(scale: float) -> tuple[float, bool]:
    """The scores' factor as the kernel takes it, not 0, and whether it is negative."""
    scale2, smallest = scale * LOG2E.value, SMALLEST.value
    return scale2 if abs(scale2) > smallest else smallest, scale2 < -smallest


__all__ = ["backward", "forward", "unsupported"]
