"""The Triton path of `silu_attention`: one launch a memory, and no wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import architecture, power_of_two
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import dot_precision, guard, refused
from ikbo_tree.kernels.silu_attention.config import silu_tiles
from ikbo_tree.kernels.silu_attention.op import Factors
from ikbo_tree.kernels.silu_attention.triton_device import silu_keys, silu_rows
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_groups import (
    arguments,
    dense,
    extent,
    own_tiles,
    owners,
    single,
)

WIDEST = 256
"""Head dims from 1 to this; wider ones would not leave room in registers."""


def unsupported(device: torch.device, q: Tensor, memories: Sequence[Memory]) -> str | None:
    """Why these kernels cannot take a call, or None."""
    biases = [m.bias.dtype for m in memories if m.bias is not None]
    reason = refused(device, q.dtype, *biases)
    if reason is not None:
        return reason
    width, value_width = q.shape[-1], memories[0].v.shape[-1]
    if max(width, value_width) > WIDEST or min(width, value_width) == 0:
        return f"head dims must be 1 to {WIDEST}; got {width} and {value_width}"
    if q.shape[0] * q.shape[1] >= 2**31:
        return f"it counts query rows in 32 bits; got {q.shape[0]} * {q.shape[1]}"
    return None


@dataclass(frozen=True)
class _Call:
    """What all launches of a call have in common."""

    q: Tensor
    do: Tensor | None
    memories: Sequence[Memory]
    live: Tensor | None
    factors: Factors
    scale: float

    def constants(self) -> dict[str, Any]:
        """Widths, and how products are taken."""
        D, DV = self.q.shape[-1], self.memories[0].v.shape[-1]
        DP, DVP = (max(16, power_of_two(width)) for width in (D, DV))
        return {"D": D, "DV": DV, "DP": DP, "DVP": DVP, "PRECISION": dot_precision(self.q.dtype)}

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Query rows and the gradient of their results."""
        return self.q, self.do

    def strides(self) -> list[tuple[int, ...]]:
        """Of both, for rows, seeds and heads."""
        return [(0, 0, 0) if x is None else x.stride()[:3] for x in self.tensors()]

    def rows(self, out: Tensor) -> Tensor:
        """Writes o, or with `do` the gradient of q."""
        part = torch.empty_like(out, dtype=torch.float32) if len(self.memories) > 1 else None
        constants, (rows, n_seed, heads, _) = self.constants(), self.q.shape
        tile = self._tiles(constants)[0]
        for i, memory in enumerate(self.memories):
            group, M = single(memory), tile.rows
            if memory.offsets is None:
                M = min(M, max(16, power_of_two(n_seed)))
            launch(
                silu_rows, (group.tile_count(rows, n_seed, M) * heads,),
                *self.tensors(), out, part, self.factors.each, memory.order, memory.offsets,
                self.live, arguments(memory, heads), extent(memory), *self.strides(), _size(memory),
                rows, group.segments(rows), n_seed, heads, self.factors.all, self.scale,
                FIRST=i == 0, LAST=i == len(self.memories) - 1, BACKWARD=self.do is not None,
                **constants, M=M, N=tile.keys, STAGES=tile.num_stages, num_warps=tile.num_warps,
            )  # fmt: skip
        return out

    def keys(self, memory: Memory, needs: Sequence[bool]) -> list[Tensor | None]:
        """The wanted gradients of a memory's k, v and bias."""
        constants, (rows, n_seed, heads, _) = self.constants(), self.q.shape
        tile = self._tiles(constants)[1]
        dk, dv = (
            torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need else None
            for x, need in zip((memory.k, memory.v), needs, strict=False)
        )
        places, kv_heads = memory.k.shape[:-2], memory.k.shape[-2]
        db = None
        if needs[2]:
            db = torch.zeros((*places, heads), dtype=torch.float32, device=self.q.device)
        launch(
            silu_keys, (own_tiles(memory, tile.keys) * kv_heads,),
            *self.tensors(), dk, dv, db, self.factors.each, memory.order, memory.offsets, self.live,
            arguments(memory, heads), extent(memory), *self.strides(), _size(memory), rows,
            owners(memory), n_seed, heads, kv_heads, self.factors.all, self.scale,
            when=places.numel() > 0, **constants, M=tile.rows, N=tile.keys, STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )  # fmt: skip
        if db is not None:
            assert memory.bias is not None
            db = (db if memory.bias_has_heads else db.sum(-1)).to(memory.bias.dtype)
        return [dk, dv, db]

    def _tiles(self, constants: dict[str, Any]) -> Any:
        width = max(constants["DP"], constants["DVP"])
        return silu_tiles(architecture(self.q.device), self.q.element_size(), width)


def forward(
    q: Tensor, memories: Sequence[Memory], live: Tensor | None, factors: Factors, scale: float
) -> Tensor:
    """[rows, n_seed, H, Dv] in q's dtype."""
    o = q.new_empty((*q.shape[:-1], memories[0].v.shape[-1]))
    if o.numel() == 0:
        return o
    with guard(q):
        return _Call(dense(q), None, memories, live, factors, scale).rows(o)


def backward(
    grad: Tensor,
    q: Tensor,
    memories: Sequence[Memory],
    live: Tensor | None,
    factors: Factors,
    scale: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of those of q, *k, *v, *bias that are needed, each rounded once."""
    count, biases = len(memories), iter(needs[1 + 2 * len(memories) :])
    each = [
        (needs[1 + i], needs[1 + count + i], m.bias is not None and next(biases))
        for i, m in enumerate(memories)
    ]
    if grad.numel() == 0:
        inputs = [q, *(m.k for m in memories), *(m.v for m in memories)]
        inputs += [m.bias for m in memories if m.bias is not None]
        wanted = zip(inputs, needs, strict=True)
        return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x, need in wanted if need]
    call = _Call(dense(q), dense(grad), memories, live, factors, scale)
    with guard(q):
        dq = call.rows(q.new_empty(q.shape)) if needs[0] else None
        found = [
            call.keys(memory, wanted) if any(wanted) else [None] * 3
            for memory, wanted in zip(memories, each, strict=True)
        ]
    columns = zip(*found, strict=True)
    return [x for x in (dq, *(x for column in columns for x in column)) if x is not None]


def _size(memory: Memory) -> int:
    return memory.k.shape[0 if memory.packed else 1]
