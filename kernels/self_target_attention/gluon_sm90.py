"""The Hopper path of `self_target_attention`: both kinds of query rows in one persistent launch.

Gradients come from the Triton path.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.common.gemm_forms import multiprocessors
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import guard
from ikbo_tree.kernels.self_target_attention import triton_kernel
from ikbo_tree.kernels.target_attention import gluon_sm90
from ikbo_tree.kernels.target_attention.gluon_config import HOPPER
from ikbo_tree.kernels.target_attention.gluon_device import TILE
from ikbo_tree.kernels.target_attention.gluon_kernel import run_roles
from ikbo_tree.kernels.target_attention.gluon_operands import (
    aligned,
    counters,
    keys_descriptor,
    rows_descriptor,
)
from ikbo_tree.kernels.target_attention.gluon_sm90 import factor
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_backward import folded
from ikbo_tree.kernels.target_attention.triton_device import COUNTS, MAPS
from ikbo_tree.kernels.target_attention.triton_groups import extent, own_tiles, owners, single

backward = triton_kernel.backward


@gluon.jit(
    do_not_specialize=[*COUNTS, "n_tiles", "n_items"],
    do_not_specialize_on_alignment=[*MAPS, "counter_ptr"],
)
def forward_both(
    own_q_desc,
    own_o_desc,
    q_desc,
    o_desc,
    k_desc,
    v_desc,
    own_o_ptr,
    own_lse_ptr,
    o_ptr,
    lse_ptr,
    counter_ptr,
    own_live_ptr,
    offsets_ptr,
    live_ptr,
    extent_ptr,
    size,
    rows,
    segments,
    owners,
    n_seed,
    n_tiles,
    n_items,
    scale2,
    H: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    NEGATIVE: gl.constexpr,
    DYNAMIC: gl.constexpr,
    LATE: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Target rows and own rows over one memory: see `run_roles`.

    own_q_desc, own_o_desc, own_o_ptr, own_lse_ptr: like those of target rows, a row an entry.
    own_live_ptr: [1] live owners of `owners`, or None. n_tiles: of target rows. n_items: tiles of
    both, times H. GROUP: query heads a key head.
    """
    # Where rows and keys share several blocks, each is a memory of its own.
    COPIES: gl.constexpr = TILE // BN if CAUSAL else 1
    run_roles(
        (q_desc, own_q_desc),
        (k_desc, k_desc)[:COPIES],
        (v_desc, v_desc)[:COPIES],
        ((o_desc, o_ptr, lse_ptr), (own_o_desc, own_o_ptr, own_lse_ptr)),
        counter_ptr,
        (offsets_ptr, live_ptr, rows, segments, n_seed),
        (own_live_ptr, owners, n_tiles),
        ((extent_ptr,), (None,), (None,)),
        (size,),
        n_items,
        scale2,
        H,
        D,
        BN,
        SLOTS,
        (GROUP, GROUP),
        PACKED,
        False,
        0,
        CAUSAL,
        NEGATIVE,
        DYNAMIC,
        LATE,
        CONSUMER_REGISTERS,
        PRODUCER_REGISTERS,
    )


def unsupported(
    device: torch.device,
    q_self: Tensor,
    q: Tensor,
    memory: Memory,
    live: Tensor | None,
    live_of: Tensor | None,
    causal: bool,
    scale: float,
) -> str | None:
    """Why this kernel cannot take a call, or None."""
    reason = gluon_sm90.refused(device, q, [memory])
    if reason is None and q_self.shape[:-2].numel() >= 2**31:
        reason = f"it counts a history's queries in 32 bits; got {tuple(q_self.shape)}"
    return reason


def forward(
    q_self: Tensor,
    q: Tensor,
    memory: Memory,
    live: Tensor | None,
    live_of: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o_self, o, lse_self, lse)."""
    # The kernel writes every row of a padded history; what lies around a packed one, nobody does.
    new = torch.zeros if memory.packed else torch.empty
    o_self = new(q_self.shape, dtype=q.dtype, device=q.device)
    lse_self = new(q_self.shape[:-1], dtype=torch.float32, device=q.device)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    rows, n_seed, heads, width = q.shape
    tile, group = HOPPER[width], single(memory)
    n_tiles = group.tile_count(rows, n_seed, TILE.value) if o.numel() else 0
    n_items = (n_tiles + (own_tiles(memory, TILE.value) if o_self.numel() else 0)) * heads
    if n_items == 0:
        return o_self, o, lse_self, lse
    scale2, negative = factor(scale)
    offsets = memory.offsets
    with guard(q):
        launch(
            forward_both,
            (min(multiprocessors(q.device), n_items),),
            rows_descriptor(aligned(folded(_entries(q_self)))),
            rows_descriptor(_entries(o_self)),
            rows_descriptor(aligned(folded(q))),
            rows_descriptor(o),
            keys_descriptor(memory.k, tile.keys),
            keys_descriptor(memory.v, tile.keys),
            o_self,
            lse_self,
            o,
            lse,
            counters(q.device),
            live_of,
            offsets,
            live if offsets is None else None,
            extent(memory),
            group.sizes()[0],
            rows,
            group.segments(rows),
            owners(memory),
            n_seed,
            n_tiles,
            n_items,
            scale2,
            H=heads,
            D=width,
            BN=tile.keys,
            SLOTS=tile.slots,
            GROUP=heads // memory.k.shape[-2],
            PACKED=int(memory.packed),
            CAUSAL=causal,
            NEGATIVE=negative,
            DYNAMIC=gluon_sm90.DYNAMIC,
            LATE=gluon_sm90.LATE,
            CONSUMER_REGISTERS=tile.consumer_registers,
            PRODUCER_REGISTERS=tile.producer_registers,
            num_warps=4,
        )
    return o_self, o, lse_self, lse


def _entries(x: Tensor) -> Tensor:
    """[entries, 1, H, width] of what belongs to a memory's keys, a view if it can be."""
    return (x.flatten(0, 1) if x.dim() == 4 else x).unsqueeze(1)


__all__ = ["backward", "forward", "unsupported"]
