"""Tiles of the attention kernels: frozen, chosen by dtype, widths and architecture alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from ikbo_tree.kernels.common import tuned


@dataclass(frozen=True)
class Tile:
    """How a program walks over a matrix of scores.

    Attributes:
        rows: query rows a tile, M.
        keys: keys a tile, N.
        num_warps: warps a program.
        num_stages: blocks of its inner loop in flight.
        descriptors: keys and values, or queries, are fetched by TMA where their strides allow it.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    descriptors: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "num_warps"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two; got {size}")
        if min(self.rows, self.keys) < 16:
            raise ValueError(f"matrix instructions take 16 rows or more; got {self}")


@dataclass(frozen=True)
class Config:
    """Everything about sizes that the launchers need to know.

    Attributes:
        forward: many query rows a segment.
        chunks: few query rows.
        chunk: keys of a chunk, a multiple of `chunks.keys`.
        few: query rows of a segment up to which its keys are cut into chunks.
        queries: gradient of the queries.
        keys: gradients of keys, values and bias.
        piece: least query rows of a piece of a long segment in the backward, a multiple of
            `keys.rows`.
        pieces: most pieces of a segment.
    """

    forward: Tile
    chunks: Tile
    chunk: int
    few: int
    queries: Tile
    keys: Tile
    piece: int
    pieces: int

    def __post_init__(self) -> None:
        if self.chunk % self.chunks.keys:
            raise ValueError(f"chunk must be a multiple of {self.chunks.keys}; got {self.chunk}")
        if self.piece % self.keys.rows:
            raise ValueError(f"piece must be a multiple of {self.keys.rows}; got {self.piece}")


FUSED_SEEDS = 16
"""With so many query rows a row, memories of several levels share a tile; with fewer, segments of
the deepest level leave a tile mostly empty, so each level has tiles of its own."""

_INTERPRETED = Config(
    forward=Tile(16, 16, 4, 1),
    chunks=Tile(16, 16, 4, 1),
    chunk=32,
    few=24,
    queries=Tile(16, 16, 4, 1),
    keys=Tile(16, 16, 4, 1),
    piece=32,
    pieces=3,
)
"""As small as can be, so that small tests reach every path."""


def _config(forward: Tile, chunks: Tile, queries: Tile, keys: Tile) -> Config:
    return Config(
        forward, chunks, chunk=256, few=256, queries=queries, keys=keys, piece=16384, pieces=16
    )


# By padded width (the larger of D and Dv); each serves the widths up to it.
_HOPPER_16 = {
    64: _config(
        forward=Tile(128, 128, 8, 2, True),
        chunks=Tile(64, 64, 4, 2),
        queries=Tile(64, 64, 4, 2, True),
        keys=Tile(64, 64, 4, 2, True),
    ),
    128: _config(
        forward=Tile(128, 128, 8, 3, True),
        chunks=Tile(64, 64, 4, 3),
        queries=Tile(64, 64, 4, 2, True),
        keys=Tile(64, 64, 4, 2, True),
    ),
    256: _config(
        forward=Tile(128, 64, 8, 2, True),
        chunks=Tile(64, 64, 8, 1),
        queries=Tile(128, 32, 8, 2, True),
        keys=Tile(32, 64, 8, 2, True),
    ),
}
_AMPERE_16 = {
    64: _config(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: _config(Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    256: _config(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
}
_AMD_16 = {
    64: _config(Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    128: _config(Tile(128, 32, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1)),
    256: _config(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
_FLOAT32 = {
    64: _config(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: _config(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: _config(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


ROLES = ("forward", "chunks", "queries", "keys")
"""The tiles that `ikbo-tree tune` may choose."""


def attention_config(arch: str, itemsize: int, width: int) -> Config:
    """The configuration for one kind of call.

    Args:
        arch: `"interpreter"`, `"gfx..."`, or `"sm_80"`, ...
        itemsize: bytes of an element of the operands, 2 or 4.
        width: the larger of D and Dv, padded to a power of two, at most 256.
    """
    frozen = _frozen(arch, itemsize, width)
    found: dict[str, Any] = {
        role: Tile(**fields["tile"])
        for role in ROLES
        if (fields := tuned.entry("target_attention", role, arch, itemsize, width)) is not None
    }
    return replace(frozen, **found) if found else frozen


@functools.cache
def _frozen(arch: str, itemsize: int, width: int) -> Config:
    if arch == "interpreter":
        return _INTERPRETED
    if itemsize == 4:
        table = _FLOAT32
    elif arch.startswith("gfx"):
        table = _AMD_16
    else:
        table = _HOPPER_16 if int(arch.removeprefix("sm_")) >= 90 else _AMPERE_16
    return table[max(width, 64)]
