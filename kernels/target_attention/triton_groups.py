"""How the memories of a call become launches and kernel arguments, decided from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ikbo_tree.kernels.common.gemm_forms import power_of_two
from ikbo_tree.kernels.common.triton_launch import described
from ikbo_tree.kernels.common.triton_tiles import tile_count
from ikbo_tree.kernels.target_attention.config import FUSED_SEEDS, Tile
from ikbo_tree.kernels.target_attention.memories import Memory

MOST = 4
"""Memories that a launch can take."""


@dataclass(frozen=True)
class Group:
    """Memories that one launch takes, and the tiles of query rows that it works in.

    Attributes:
        memories: the memories.
        tiles: the one whose segments are cut into tiles: the one with the most rows. Which it is
            makes no difference to any bits, nor to what is compiled.
        runs: they have different segments, so that a tile may have several rows of some.
    """

    memories: tuple[Memory, ...]
    tiles: Memory
    runs: bool

    def segments(self, rows: int) -> int:
        """How many segments are cut into tiles."""
        offsets = self.tiles.offsets
        return rows if offsets is None else offsets.shape[0] - 1

    def tile_count(self, rows: int, n_seed: int, size: int) -> int:
        """Tiles of `size` folded rows that there may be."""
        if self.tiles.offsets is None:
            return rows * -(-n_seed // size)
        return tile_count(rows, self.segments(rows), n_seed, size)

    def arguments(self, heads: int) -> tuple[tuple[Any, ...], ...]:
        """The memories as kernels take them: see triton_device."""
        return tuple(arguments(memory, heads) for memory in self.memories)

    def maps(self) -> list[Tensor | None]:
        """Extent, index and border of each memory, as kernels take them."""
        found: list[Tensor | None] = []
        for memory in self.memories:
            found.append(extent(memory))
            found += [memory.index, memory.offsets] if self.runs else [None, None]
        return found + [None] * (3 * MOST - len(found))

    def sizes(self) -> tuple[int, ...]:
        """What goes beside them."""
        sizes = [memory.k.shape[0 if memory.packed else 1] for memory in self.memories]
        return (*sizes, *[0] * (MOST - len(sizes)))


def groups(memories: Sequence[Memory], n_seed: int) -> list[Group]:
    """The launches of a call, in order.

    Levels of a sorted tree share one, since each row's ancestors are constant in a run of rows.
    What is reached through an order (tables, unsorted trees) has runs of its own.
    """
    found: dict[Any, list[int]] = {}
    for i, memory in enumerate(memories):
        fused = memory.order is None and n_seed >= FUSED_SEEDS
        found.setdefault("sorted" if fused else _route(memory), []).append(i)
    return [
        _group(members[at : at + MOST], memories)
        for members in found.values()
        for at in range(0, len(members), MOST)
    ]


def single(memory: Memory) -> Group:
    """A launch for one memory."""
    return Group((memory,), memory, False)


def owners(memory: Memory) -> int:
    """Allocated rows of a memory."""
    if memory.packed:
        assert memory.extent is not None
        return memory.extent.shape[0] - 1
    return memory.k.shape[0]


def own_tiles(memory: Memory, size: int) -> int:
    """Tiles of `size` entries of one row that a memory may have."""
    if memory.packed:
        return tile_count(memory.k.shape[0], owners(memory), 1, size)
    return owners(memory) * -(-memory.k.shape[1] // size)


def _group(members: list[int], memories: Sequence[Memory]) -> Group:
    chosen = tuple(memories[i] for i in members)
    runs = len({_route(memory) for memory in chosen}) > 1
    return Group(chosen, max(chosen, key=_segments), runs)


def _segments(memory: Memory) -> float:
    return float("inf") if memory.offsets is None else memory.offsets.shape[0]


def _route(memory: Memory) -> tuple[int, int] | None:
    if memory.offsets is None:
        return None
    return memory.offsets.data_ptr(), 0 if memory.order is None else memory.order.data_ptr()


def arguments(memory: Memory, heads: int) -> tuple[Any, ...]:
    """One memory as kernels take it.

    Args:
        memory: the memory.
        heads: of the queries.
    """
    k, v, bias, mask = dense(memory.k), dense(memory.v), memory.bias, memory.mask
    if bias is not None:
        bias = bias.contiguous()
    return (
        k,
        v,
        bias,
        None if mask is None else mask.contiguous(),
        *_strides(k),
        *_strides(v),
        heads if memory.bias_has_heads else 1,
        1 if memory.bias_has_heads else 0,
        heads // k.shape[-2],
    )


def extent(memory: Memory) -> Tensor | None:
    """Which keys each row owns, as kernels take it."""
    return None if memory.extent is None else memory.extent.contiguous()


def _strides(x: Tensor) -> tuple[int | None, int, int]:
    """Of rows (None if packed), keys and heads."""
    return (None if x.dim() == 3 else x.stride(0), x.stride(-3), x.stride(-2))


def dense(x: Tensor) -> Tensor:
    """`x` with neighbouring elements in its last dim; itself where it has."""
    if x.numel() == 0:
        # Its strides may be anything, and would be compiled for.
        return x.new_empty(x.shape)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def descriptor(x: Tensor, rows: int, entries: int, pitch: int) -> TensorDescriptor | None:
    """[..., heads, width] as [entries, columns] with a box of `rows` of one head, for TMA.

    Args:
        x: whose entries lie at one distance, `pitch`.
        rows: of the box.
        entries: in all.
        pitch: distance of entries.

    Returns:
        None where TMA cannot: strides that are no multiple of 16 bytes, a width that is no power of
        two.
    """
    head, width = x.stride(-2), x.shape[-1]
    unit = 16 // x.element_size()
    columns = (x.shape[-2] - 1) * head + width
    if entries == 0:
        # Never read; but without one, another kernel would be compiled.
        x, entries = x.new_empty((1, pitch)), 1
    if width != power_of_two(width) or width < max(16, unit) or x.data_ptr() % 16:
        return None
    if pitch % unit or head % unit or pitch < columns or entries >= 2**31:
        return None
    return described(x, [entries, columns], [pitch, 1], [rows, width])


def _key_descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    """Of keys or values."""
    pitch, entries = x.stride(-3), x.shape[:-2].numel()
    if x.dim() == 4 and x.shape[0] > 1 and x.stride(0) != x.shape[1] * pitch:
        return None
    return descriptor(x, rows, entries, pitch)


def descriptors(group: Group, tile: Tile) -> list[Any]:
    """Descriptors of k and v of each memory, `2 * MOST` with None for what is missing."""
    found: list[Any] = []
    for memory in group.memories:
        usable = tile.descriptors and memory.mask is None
        found += [
            _key_descriptor(dense(x), tile.keys) if usable else None for x in (memory.k, memory.v)
        ]
    return found + [None] * (2 * MOST - len(found))
