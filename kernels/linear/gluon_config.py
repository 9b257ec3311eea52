"""Frozen tiles of the Hopper kernel of `linear`, and what it is compiled for.

Tiles are chosen by N, never by row counts (contract 4). None has been measured yet; the reasons are
arithmetic and what was measured of `linear_compression`, whose main loop is the same:

- Two consumers of [64, 256] that share a tile of W and take different rows of x read 48 bytes a
  cycle from the L2 cache at full tensor rate, near what a multiprocessor gets. Two that take turns
  with tiles of [128, 128] each would hide the end of a tile under the other's product, but read 64.
- 64 steps of K and four stages beat 32 and eight.
- 16-bit partials fit beside the accumulators and are fetched before the product is complete;
  float32 ones fit by half.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

BK = 64
"""Steps of K: a row of x or W is one line of 128 bytes in shared memory."""

PIECE = 64
"""Columns of a piece of the result in shared memory, for the same reason."""


@dataclass(frozen=True)
class Tile:
    """Tile and how it is run. A tile has 128 rows, 64 a consumer.

    Attributes:
        BN: columns of a tile: 64, 128 or 256.
        stages: steps that are loaded ahead.
        prefetch: halves of the first partial that are fetched before the product is complete.
        outstanding: products of a warpgroup that run on while it waits for the next operands.
        keep: stage the right half of the output in operand slots that are free at the end, not
            where the left half was.
        ahead: the loading warp looks whether the partials of a tile are there, ahead of time.
        behind: that fetch is behind the first product, not before it.
        branch: the wait for the copy of the last output stays behind the first product.
        consumer_registers: of a consumer's thread.
        producer_registers: of the loading warp's.
    """

    BN: int
    stages: int
    prefetch: int = 2
    outstanding: int = 1
    keep: bool = True
    ahead: bool = True
    behind: bool = True
    branch: bool = True
    consumer_registers: int = 232
    producer_registers: int = 24

    def __post_init__(self) -> None:
        if self.BN not in (64, 128, 256):
            raise ValueError(f"BN must be 64, 128 or 256; got {self.BN}")
        if self.stages < 4:
            raise ValueError(f"stages must be at least 4, two are kept; got {self.stages}")
        if self.prefetch not in (0, 1, 2) or self.outstanding not in (0, 1):
            raise ValueError(f"prefetch must be 0, 1 or 2, outstanding 0 or 1; got {self}")


class Form(NamedTuple):
    """What a launch is compiled for: plain numbers, so that Triton tells one from another.

    Attributes:
        levels: of the launch.
        result: number of the tree's last level among them, or -1.
        biased: number of the level that adds the bias, or -1.
        edges: for each producer its consumer's number, how many of the consumer's come before, and
            its own number; -1 where an earlier launch had it.
        join: most producers of a level.
        column_blocks: column blocks of BN columns of N.
        k_tail: columns of the last step over K that are not padding, in 16s, at any level.
        described: the result is stored by the copy engine.
        unit: the largest of 8, 4, 2, 1 that divides N.
        BN: see `Tile`; so for all that follow.
        stages: steps loaded ahead.
        prefetch: halves of the partial fetched early.
        outstanding: products that run on.
        keep: output in operand slots.
        ahead: counters are looked at ahead of time.
        behind: partials are fetched behind the first product.
        branch: a branch before the wait for the output's copy.
        consumer_registers: a thread.
        producer_registers: a thread.
    """

    levels: int
    result: int
    biased: int
    edges: tuple[tuple[int, int, int], ...]
    join: int
    column_blocks: int
    k_tail: int
    described: bool
    unit: int
    BN: int
    stages: int
    prefetch: int
    outstanding: int
    keep: bool
    ahead: bool
    behind: bool
    branch: bool
    consumer_registers: int
    producer_registers: int


TILES = {
    256: Tile(BN=256, stages=4),
    128: Tile(BN=128, stages=6),
    64: Tile(BN=64, stages=8),
}

_COST = {256: 1.0, 128: 1.25, 64: 1.6}
"""Time of a column, by tile width: by the bytes that are read from L2 for it."""


@functools.cache
def choose(N: int, partial_bytes: int) -> Tile:
    """The tile for results of N columns.

    Args:
        N: columns of a row's result.
        partial_bytes: bytes of an element of a partial result.
    """
    BN = min(TILES, key=lambda width: -(-N // width) * width * _COST[width])
    tile = TILES[BN]
    return replace(tile, prefetch=1) if partial_bytes == 4 else tile
