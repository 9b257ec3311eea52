"""The Triton path of `self_target_attention`: two kinds of query rows, one launch.

Their gradients of the shared keys and values are summed in one launch, too.
"""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import guard
from ikbo_tree.kernels.target_attention import triton_backward, triton_kernel
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_backward import Rows, Sizes, folded
from ikbo_tree.kernels.target_attention.triton_device import COUNTS, LOG2E, MAPS
from ikbo_tree.kernels.target_attention.triton_forward import forward_tile
from ikbo_tree.kernels.target_attention.triton_groups import (
    dense,
    descriptors,
    extent,
    own_tiles,
    owners,
    single,
)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=MAPS)
def forward_both(
    own_q_ptr,
    own_o_ptr,
    own_lse_ptr,
    own_live_ptr,
    q_ptr,
    o_ptr,
    lse_ptr,
    order_ptr,
    offsets_ptr,
    live_ptr,
    memory,
    extent_ptr,
    k_desc,
    v_desc,
    size,
    own_q_seed,
    own_q_head,
    q_row,
    q_seed,
    q_head,
    rows,
    segments,
    owners,
    n_seed,
    heads,
    own_programs,
    scale2,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The first `own_programs` programs take own queries, the longer work; the others target rows.

    See `forward_tile`; own_q_ptr [entries, heads, D], owners: rows of the memory.
    """
    if tl.program_id(0) < own_programs:
        forward_tile(
            own_q_ptr,
            own_o_ptr,
            own_lse_ptr,
            None,
            None,
            None,
            None,
            own_live_ptr,
            (memory,),
            ((extent_ptr,), (None,), (None,)),
            (k_desc, v_desc),
            (size,),
            own_q_seed,
            own_q_seed,
            own_q_head,
            0,
            owners,
            1,
            heads,
            tl.program_id(0),
            scale2,
            1,
            D,
            DV,
            DP,
            DVP,
            M,
            N,
            True,
            True,
            False,
            True,
            CAUSAL,
            NEGATIVE,
            PRECISION,
            STAGES,
        )
    else:
        forward_tile(
            q_ptr,
            o_ptr,
            lse_ptr,
            None,
            None,
            order_ptr,
            offsets_ptr,
            live_ptr,
            (memory,),
            ((extent_ptr,), (None,), (None,)),
            (k_desc, v_desc),
            (size,),
            q_row,
            q_seed,
            q_head,
            rows,
            segments,
            n_seed,
            heads,
            tl.program_id(0) - own_programs,
            scale2,
            1,
            D,
            DV,
            DP,
            DVP,
            M,
            N,
            True,
            True,
            False,
            False,
            False,
            NEGATIVE,
            PRECISION,
            STAGES,
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
    """Why these kernels cannot take a call, or None."""
    return triton_kernel.unsupported(device, q, [memory], live, scale)


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
    sizes = Sizes(q, memory.v.shape[-1], scale)
    own = folded(_entries(q_self, memory))
    o_self = torch.zeros((*q_self.shape[:-1], sizes.DV), dtype=q.dtype, device=q.device)
    lse_self = torch.zeros(q_self.shape[:-1], dtype=torch.float32, device=q.device)
    o = q.new_empty((*q.shape[:-1], sizes.DV))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    group, q = single(memory), dense(q)
    tile = sizes.config.forward if sizes.n_seed >= FUSED_SEEDS else sizes.config.chunks
    M = tile.rows
    own_programs = own_tiles(memory, M) * sizes.heads
    programs = group.tile_count(sizes.rows, sizes.n_seed, M) * sizes.heads
    if own_programs + programs == 0:
        return o_self, o, lse_self, lse
    with guard(q):
        launch(
            forward_both,
            (own_programs + programs,),
            own,
            o_self,
            lse_self,
            live_of,
            q,
            o,
            lse,
            memory.order,
            memory.offsets,
            live,
            group.arguments(sizes.heads)[0],
            extent(memory),
            *descriptors(group, tile)[:2],
            group.sizes()[0],
            own.stride(0),
            own.stride(2),
            *q.stride()[:3],
            sizes.rows,
            group.segments(sizes.rows),
            owners(memory),
            sizes.n_seed,
            sizes.heads,
            own_programs,
            abs(scale) * LOG2E.value,
            **sizes.widths(),
            M=M,
            N=tile.keys,
            CAUSAL=causal,
            NEGATIVE=scale < 0,
            PRECISION=sizes.precision,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    return o_self, o, lse_self, lse


def backward(
    grads: Sequence[Tensor | None],
    results: Sequence[Tensor],
    q_self: Tensor,
    q: Tensor,
    memory: Memory,
    live: Tensor | None,
    live_of: Tensor | None,
    causal: bool,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of q_self, q, k, v that are needed, each rounded once."""
    sizes = Sizes(q, memory.v.shape[-1], scale)
    do_self, do, dlse_self, dlse = grads
    o_self, o, lse_self, lse = results
    found: list[Tensor | None] = [None, None, None, None]
    with guard(q):
        rows = Rows.of(q, torch.zeros_like(o) if do is None else do, o, lse, dlse)
        do_self = torch.zeros_like(o_self) if do_self is None else do_self
        entry_rows = [_entries(x, memory) for x in (q_self, do_self, o_self)]
        entry_lse = [
            None if x is None else x.reshape(-1, 1, sizes.heads) for x in (lse_self, dlse_self)
        ]
        own = Rows.of(*entry_rows, *entry_lse)
        dq_self = triton_backward.own_queries(
            own, memory, live_of, sizes, needs[0], needs[0] or needs[2], causal
        )
        found[0] = None if dq_self is None else dq_self.view(q_self.shape)
        found[1] = triton_backward.queries(
            rows, [memory], live, sizes, needs[1], needs[1] or needs[2]
        )
        if needs[2] or needs[3]:
            found[2], found[3], _ = triton_backward.keys(
                rows, memory, live, sizes, (needs[2], needs[3], False), own, live_of, causal
            )
    return [x for x in found if x is not None]


def _entries(x: Tensor, memory: Memory) -> Tensor:
    """[entries, 1, H, width] of what belongs to the memory's keys, a view if it can be."""
    return (x if memory.packed else x.flatten(0, 1)).unsqueeze(1)
