"""Launches of the backward: the queries' gradient first, which finds delta, then each memory's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ikbo_tree.kernels.common.gemm_forms import architecture, multiprocessors, power_of_two
from ikbo_tree.kernels.common.triton_launch import launch
from ikbo_tree.kernels.common.triton_lib import dot_precision
from ikbo_tree.kernels.target_attention.config import Config, attention_config
from ikbo_tree.kernels.target_attention.memories import Memory
from ikbo_tree.kernels.target_attention.triton_groups import (
    Group,
    arguments,
    dense,
    descriptor,
    descriptors,
    extent,
    groups,
    own_tiles,
    owners,
    single,
)
from ikbo_tree.kernels.target_attention.triton_key_gradients import (
    key_gradients,
    sum_heads,
)
from ikbo_tree.kernels.target_attention.triton_queries import query_gradients

STATS_STEP = 4
"""TMA fetches floats from multiples of 16 bytes only (elsewhere an H200 raises an illegal
instruction): where folded rows a row are no multiple of this, segments begin in between."""
WORKSPACE = 1 << 29
"""Bytes of float32 sums up to which programs share an item's pieces."""


class Sizes:
    """What all launches of a call have in common."""

    def __init__(self, q: Tensor, value_width: int, scale: float) -> None:
        self.rows, self.n_seed, self.heads, self.D = q.shape
        self.DV = value_width
        self.DP, self.DVP = (max(16, power_of_two(width)) for width in (self.D, self.DV))
        self.scale = scale
        self.precision = dot_precision(q.dtype)
        arch = architecture(q.device)
        self.config: Config = attention_config(arch, q.element_size(), max(self.DP, self.DVP))

    def tile_rows(self, group: Group, rows: int) -> int:
        """Query rows of a tile: no more than a segment has where each row is one."""
        if group.tiles.offsets is not None:
            return rows
        return min(rows, max(16, power_of_two(self.n_seed)))

    def widths(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {"D": self.D, "DV": self.DV, "DP": self.DP, "DVP": self.DVP}


@dataclass(frozen=True)
class Rows:
    """Query rows and what their attention came to.

    Attributes:
        q: [rows, n, H, D], rows and n of one stride.
        do: [rows, n, H, DV], gradient of o, likewise.
        o: [rows, n, H, DV], contiguous.
        lse: [rows, n, H], float32, contiguous.
        dlse: likewise, gradient of it, any float dtype; or None.
        stats: [2, H, rows * n or more] float32, written by `queries`: lse in units of log2 with inf
            for -inf, and what softmax subtracts from each dP.
    """

    q: Tensor
    do: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None
    stats: Tensor

    @staticmethod
    def of(q: Tensor, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> Rows:
        """From tensors of any strides."""
        # A multiple of 16 whatever the rows: TMA wants 16 bytes, Triton one kind of integer.
        pitch = max(1, -(-q.shape[0] * q.shape[1] // 16)) * 16
        return Rows(
            folded(q),
            folded(do),
            o.contiguous(),
            lse.contiguous(),
            None if dlse is None else dlse.contiguous(),
            lse.new_empty((2, q.shape[2], pitch)),
        )

    def arguments(self) -> tuple[Tensor | int, ...]:
        """As `key_gradients` takes them."""
        q, do = self.q, self.do
        return (
            q,
            _pitch(q),
            q.stride(2),
            do,
            _pitch(do),
            do.stride(2),
            self.stats[0],
            self.stats[1],
            self.stats.stride(1),
        )

    def descriptors(self, size: int) -> list[Any]:
        """Of q, dO and `stats`, with boxes of `size` rows; None where there can be none."""
        rows, n = self.q.shape[:2]
        found = [descriptor(x, size, rows * n, _pitch(x)) for x in (self.q, self.do)]
        if n % STATS_STEP:
            return [*found, None]
        return [*found, TensorDescriptor.from_tensor(self.stats.flatten(0, 1), [1, size])]


def folded(x: Tensor) -> Tensor:
    """[rows, n, H, width] whose rows and n are one dim, and whose last dim is dense."""
    rows, n = x.shape[:2]
    x = dense(x)
    return x if rows == 1 or n == 1 or x.stride(0) == n * x.stride(1) else x.contiguous()


def _pitch(x: Tensor) -> int:
    return x.stride(0) if x.shape[1] == 1 else x.stride(1)


def queries(
    rows: Rows,
    memories: Sequence[Memory],
    live: Tensor | None,
    sizes: Sizes,
    needed: bool,
    exact: bool = True,
) -> Tensor | None:
    """Writes `rows.stats`, and returns the gradient of q if it is needed.

    exact: delta is, even if o was rounded to 16 bits.
    """
    launches = groups(memories, sizes.n_seed)
    exact = exact and rows.q.element_size() < 4
    last = len(launches) - 1
    dq = torch.empty(rows.q.shape, dtype=rows.q.dtype, device=rows.q.device) if needed else None
    miss = torch.empty_like(rows.lse) if exact and last else None
    call = _QueryCall(rows, live, sizes, miss, dq)
    if dq is not None and last == 0:
        call(launches[0], True, False, exact, True, True)
        return dq
    if exact:
        for i, group in enumerate(launches):
            call(group, False, False, True, i == 0, i == last)
    else:
        call(launches[0], False, False, False, True, True)
    if dq is not None:
        part = torch.empty_like(dq, dtype=torch.float32) if last else None
        call = _QueryCall(rows, live, sizes, None, dq, part)
        for i, group in enumerate(launches):
            call(group, True, True, False, i == 0, i == last)
    return dq


def own_queries(
    own: Rows,
    memory: Memory,
    live: Tensor | None,
    sizes: Sizes,
    needed: bool,
    exact: bool,
    causal: bool,
) -> Tensor | None:
    """`queries` for those that belong to a memory's own rows; zeros where they are no key's.

    Args:
        own: [entries, 1, H, D].
        memory: whose keys they are.
        live: [1], live rows of the memory, or None.
        sizes: of the call.
        needed: whether their gradient is.
        exact: delta is to be.
        causal: they attend to no later key.
    """
    exact = exact and own.q.element_size() < 4
    dq = torch.zeros(own.q.shape, dtype=own.q.dtype, device=own.q.device) if needed else None
    call = _QueryCall(own, live, sizes, None, dq, own=True, causal=causal)
    call(single(memory), needed, False, exact, True, True)
    return dq


@dataclass(frozen=True)
class _QueryCall:
    rows: Rows
    live: Tensor | None
    sizes: Sizes
    miss: Tensor | None
    dq: Tensor | None
    part: Tensor | None = None
    own: bool = False
    causal: bool = False

    def __call__(
        self, group: Group, dq: bool, known: bool, exact: bool, first: bool, last: bool
    ) -> None:
        sizes, rows = self.sizes, self.rows
        tile = sizes.config.queries
        if self.own:
            M = tile.rows
            tiles = own_tiles(group.tiles, M)
            counts = (rows.q.shape[0], owners(group.tiles), 1)
        else:
            M = sizes.tile_rows(group, tile.rows)
            tiles = group.tile_count(sizes.rows, sizes.n_seed, M)
            counts = (sizes.rows, group.segments(sizes.rows), sizes.n_seed)
        launch(
            query_gradients,
            (tiles * sizes.heads,),
            rows.q,
            rows.do,
            rows.o,
            rows.lse,
            rows.dlse,
            *rows.stats,
            self.miss,
            self.dq,
            self.part,
            None if self.own else group.tiles.order,
            None if self.own else group.tiles.offsets,
            self.live,
            group.arguments(sizes.heads),
            *group.maps(),
            *descriptors(group, tile),
            *group.sizes(),
            *rows.q.stride()[:3],
            *rows.do.stride()[:3],
            *counts,
            sizes.heads,
            rows.stats.stride(1),
            sizes.scale,
            COUNT=len(group.memories),
            **sizes.widths(),
            M=M,
            N=tile.keys,
            DQ=dq,
            KNOWN=known,
            EXACT=exact,
            FIRST=first,
            LAST=last,
            RUNS=group.runs,
            OWN=self.own,
            CAUSAL=self.causal,
            PRECISION=sizes.precision,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


def keys(
    rows: Rows,
    memory: Memory,
    live: Tensor | None,
    sizes: Sizes,
    needs: tuple[bool, bool, bool],
    own: Rows | None = None,
    own_live: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of a memory's k, v and bias, those that are needed.

    Args:
        rows: the query rows, after `queries`.
        memory: the memory.
        live: [1], live query rows, or None.
        sizes: of the call.
        needs: which of k, v and bias.
        own: queries of the memory's own rows, one a key: [entries, 1, H, D].
        own_live: [1], live rows of the memory, or None.
        causal: the own queries attend to no later key.
    """
    k, v, bias = memory.k, memory.v, memory.bias
    make = torch.zeros if memory.packed else torch.empty
    dk, dv = (
        make(x.shape, dtype=x.dtype, device=x.device) if needed else None
        for x, needed in zip((k, v), needs[:2], strict=True)
    )
    entries = k.shape[:-2].numel()
    db = k.new_zeros((entries, sizes.heads), dtype=torch.float32) if needs[2] else None
    if entries > 0:
        _launch_keys(rows, memory, live, sizes, (dk, dv, db), own, own_live, causal)
    if db is None or bias is None:
        return dk, dv, None
    if memory.bias_has_heads:
        return dk, dv, db.to(bias.dtype).view(bias.shape)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    if entries > 0:
        launch(sum_heads, (-(-entries // 1024),), db, dbias, entries, sizes.heads, BLOCK=1024)
    return dk, dv, dbias


def _launch_keys(
    rows: Rows,
    memory: Memory,
    live: Tensor | None,
    sizes: Sizes,
    results: tuple[Tensor | None, ...],
    own: Rows | None,
    own_live: Tensor | None,
    causal: bool,
) -> None:
    k, config, tile = memory.k, sizes.config, sizes.config.keys
    kv_heads = k.shape[-2]
    items = own_tiles(memory, tile.keys) * kv_heads
    slot = tile.keys * (sizes.DP + sizes.DVP + sizes.heads // kv_heads) * 4
    programs, splits, part = _share(k, sizes, items, slot)
    counters = torch.zeros((2, 4), dtype=torch.int32, device=k.device)
    usable = tile.descriptors and memory.order is None
    for shared in (splits,) if splits == 1 else (splits, 0):
        launch(
            key_gradients,
            (programs,),
            rows.arguments(),
            *(rows.descriptors(tile.rows) if usable else (None, None, None)),
            None if own is None else own.arguments(),
            *results,
            part,
            counters[0 if shared else 1],
            memory.order,
            memory.offsets,
            live,
            own_live,
            arguments(memory, sizes.heads),
            extent(memory),
            k.shape[0 if memory.packed else 1],
            sizes.rows,
            owners(memory),
            sizes.n_seed,
            sizes.heads,
            kv_heads,
            items * max(shared, 1),
            shared,
            sizes.scale,
            **sizes.widths(),
            M=tile.rows,
            N=tile.keys,
            PIECE=config.piece,
            PIECES=config.pieces,
            SELF=own is not None,
            CAUSAL=causal,
            DK=results[0] is not None,
            DV_=results[1] is not None,
            DB=results[2] is not None,
            PRECISION=sizes.precision,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )


def _share(k: Tensor, sizes: Sizes, items: int, slot: int) -> tuple[int, int, Tensor]:
    """How many programs run, how many share an item, and their room for sums.

    Makes no difference to any bits.
    """
    running = 2 * multiprocessors(k.device)
    splits, slots = 1, 0
    if sizes.rows * sizes.n_seed > sizes.config.piece:
        few = items < running and items * sizes.config.pieces * slot <= WORKSPACE
        splits = sizes.config.pieces if few else 1
        slots = items * splits if few else 2 * min(items, running)
    part = torch.empty(max(1, slots * slot // 4), dtype=torch.float32, device=k.device)
    return min(items * splits, running), splits, part
