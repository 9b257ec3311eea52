"""Frozen tiles of the Hopper kernel of `linear_compression`.

Chosen by N and by what partial results are kept in, never by row counts (contract 4). The entry for
256 columns was measured on a two-level prototype (M = 433, K = 866 and 1178, H200), the narrow ones
follow from it.

- Two consumers of [64, 256] that share an E tile and take different row blocks of W read 48 bytes a
  cycle from the L2 cache at full tensor rate, near what a multiprocessor gets; narrower tiles read
  more for the same arithmetic, so columns are only cut where they would be padding.
- 64 steps of K and four stages beat 32 and eight (8 % of the time), and 192-row tiles with three.
- 16-bit partials fit beside the accumulators and are fetched before the product; float32 ones fit
  by half.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

BK = 64
"""Steps of K: a row of W is one line of 128 bytes in shared memory."""


@dataclass(frozen=True)
class Tile:
    """Tile and how it is run.

    Attributes:
        BN: columns of a tile: 64, 128 or 256.
        stages: steps that are loaded ahead.
        prefetch: halves of the partial result that are fetched before the product.
        outstanding: products of a warpgroup that run on while it waits for the next operands.
        keep: stage the output in operand slots that are free at the end, not in two turns.
        ahead: the loading warp looks whether a tile's partial is there, ahead of time.
        behind: that fetch is behind the first product, not before it.
        branch: the wait for the copy of the last output stays behind the first product.
        late: the singles of the last rows come at the end.
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
    late: bool = True
    consumer_registers: int = 232
    producer_registers: int = 24

    def __post_init__(self) -> None:
        if self.BN not in (64, 128, 256):
            raise ValueError(f"BN must be 64, 128 or 256; got {self.BN}")
        if self.stages < 4:
            raise ValueError(f"stages must be at least 4, two are kept; got {self.stages}")
        if self.prefetch not in (0, 1, 2) or self.outstanding not in (0, 1):
            raise ValueError(f"prefetch must be 0, 1 or 2, outstanding 0 or 1; got {self}")


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


def partial_type(dtype: torch.dtype | None) -> torch.dtype:
    """What partial results are kept in."""
    return dtype or torch.float32
