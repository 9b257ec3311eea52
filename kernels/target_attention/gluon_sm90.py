"""The Hopper path of `target_attention`: one persistent, warp-specialised launch, in Gluon.

Contract 4 holds because the keys of a row are walked in an order that follows from how many there
are, whatever tile the row is in and whichever block has that tile. Gradients come from the Triton
path.

With few query rows a row, segments too short to be worth tiles are left to the Triton path's
chunks: two launches, of which each finds out from a segment's own length whether it is theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ikbo_tree.kernels.common.gemm_forms import architecture, multiprocessors, power_of_two
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import INTERPRETED, guard
from ikbo_tree.kernels.target_attention import triton_kernel
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS
from ikbo_tree.kernels.target_attention.gluon_config import HOPPER
from ikbo_tree.kernels.target_attention.gluon_kernel import attention_forward
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_backward import Sizes, folded
from ikbo_tree.kernels.target_attention.triton_device import LOG2E
from ikbo_tree.kernels.target_attention.triton_groups import (
    MOST,
    Group,
    dense,
    groups,
)

TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
TILE = 128
"""Folded query rows of a tile."""
SMALLEST = 2.0**-120
"""Stands in for a factor of 0, with which -inf would make NaN; scores still come out as 0."""
DYNAMIC = True
"""Blocks draw their tiles from a counter; makes no difference to any bits."""
LATE = True
"""Row sums are added up across threads once a tile instead of once a block."""

backward = triton_kernel.backward


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
    scale2 = scale * LOG2E.value
    return scale2 if abs(scale2) > SMALLEST else SMALLEST, scale2 < -SMALLEST


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """[2] int32 zeros that no launch at the same time uses; a launch leaves them zero.

    Launches of one stream follow each other and share them. A graph may run on any stream, so each
    launch that is captured has its own, which the graph clears.
    """
    if device.type != "cuda":
        return torch.zeros(2, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _COUNTERS[key]


def rows_descriptor(x: Tensor) -> TensorDescriptor:
    """[rows, n, H, D], rows and n of one stride, with boxes of 64 rows of one head."""
    n = x.shape[0] * x.shape[1]
    pitch = x.stride(0) if x.shape[1] == 1 else x.stride(1)
    return _descriptor(x, (n, *x.shape[2:]), (pitch, *x.stride()[2:]), (64, 1))


def keys_descriptor(x: Tensor, keys: int) -> TensorDescriptor:
    """[..., S, Hkv, D] as [rows, S, Hkv, D], with boxes of so many keys of one row and head."""
    x = aligned(x if x.dim() == 4 else x[None])
    return _descriptor(x, tuple(x.shape), x.stride(), (1, keys, 1))


def _descriptor(
    x: Tensor, shape: tuple[int, ...], strides: Sequence[int], box: tuple[int, ...]
) -> TensorDescriptor:
    width = shape[-1]
    # A dim of one entry may have any stride; TMA wants multiples of 16 bytes.
    strides = [width if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    strides[-1] = 1
    if x.numel() == 0:
        # Never read; but a descriptor must have something.
        x, shape = x.new_empty((1, width)), (*[1] * len(box), width)
        strides = [*[width] * len(box), 1]
    block = (*box, power_of_two(width))
    return TensorDescriptor(x, list(shape), strides, list(block), _layout(block, x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])


def aligned(x: Tensor) -> Tensor:
    """`x` as TMA can fetch it: dense rows a multiple of 16 bytes apart; itself where it is."""
    x = dense(x)
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    fits = all(stride % unit == 0 and stride > 0 for stride in strides)
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


__all__ = ["backward", "forward", "unsupported"]
