"""What the matrix kernels of the split linear ops are compiled for: tiles, forms of operands."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n` (and 1)."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def architecture(device: torch.device) -> str:
    """`"sm_90"`, `"gfx942"`, ...; `"interpreter"` for the CPU, where kernels are only tested."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has; 4 for the CPU."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@dataclass(frozen=True)
class Tile:
    """Tile of a matrix product [M, N] over K, and how it is run.

    Attributes:
        BM: rows of a tile.
        BN: columns of a tile.
        BK: length of one step over the contracted dimension.
        warps: warps a program.
        stages: steps that are loaded ahead.
        parts: 1, 2 or 4: groups of columns on which the epilogue works, one after another.
        short: whether a shorter row tile may serve the last rows.
        least_last: rows that the shorter tile has at least.
        persistent: as many programs as the device runs at a time, each of which takes one tile
            after another. Where operands are descriptors.
        described_out: the result is stored through a descriptor, where operands are descriptors.
    """

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    parts: int = 1
    short: bool = False
    least_last: int = 64
    persistent: bool = False
    described_out: bool = False

    def __post_init__(self) -> None:
        for name in ("BM", "BN", "BK", "warps", "parts"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two; got {value}")
        if min(self.BM, self.BN // self.parts, self.BK) < 16:
            raise ValueError(f"no side of a tile may be below 16; got {self}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1; got {self.stages}")
        if self.short and self.persistent:
            raise ValueError("a persistent kernel has tiles of one size")

    def fitted(self, M: int, N: int) -> Tile:
        """The same, no larger than a product of M rows and N columns needs."""
        BM = min(self.BM, max(16, power_of_two(M)))
        BN = min(self.BN, max(16, power_of_two(N)))
        saved = (self.BM // BM) * (self.BN // BN)
        return replace(
            self,
            BM=BM,
            BN=BN,
            warps=max(min(self.warps, 4), self.warps // saved),
            parts=max(1, min(self.parts // saved, BN // 16)),
        )

    def narrow(self) -> Tile:
        """Half the columns, for accesses narrower than 16 bytes: they take twice the registers."""
        BN = max(16, self.BN // 2)
        return replace(self, BN=BN, parts=min(self.parts, BN // 16))

    def last_rows(self, M: int) -> int:
        """Rows of the last row tile of a product with M rows."""
        rest = M % self.BM
        if not self.short or rest == 0:
            return self.BM
        return min(self.BM, max(self.least_last, power_of_two(rest)))


@dataclass(frozen=True)
class Operand:
    """How the kernels find one operand in memory.

    Attributes:
        pieces: 1 or 2 stacked addends.
        transposed: the dimension that the product contracts is not the contiguous one of A, or is
            the one of B.
        descriptor: given as a tensor descriptor; otherwise as a pointer and strides.
        unit: a power of two up to 16 that divides the strides and the contiguous extent; the
            kernel gets them divided by it.
    """

    pieces: int = 1
    transposed: bool = False
    descriptor: bool = False
    unit: int = 1


class Form(NamedTuple):
    """All that a matrix kernel is compiled for, as plain numbers and strings.

    Attributes:
        BM: rows of a tile.
        BN: columns of a tile.
        BK: length of a step over the contracted dimension.
        last: rows of the last row tile.
        parts: groups of columns of the epilogue.
        a_pieces: see `Operand`; so for all that follow.
        a_transposed: of the left operand.
        a_descriptor: of the left operand.
        a_unit: of the left operand.
        b_pieces: of the right operand.
        b_transposed: of the right operand.
        b_descriptor: of the right operand.
        b_unit: of the right operand.
        rows_along: `"batch"`, or the dimension of the product along which the rows of the tree
            lie: `"m"`, or `"k"` where they are summed over.
        zero_dead: dead rows of the result are written, as zeros.
        precision: `input_precision` of the products.
        persistent: see `Tile`.
        out_descriptor: the result is given as a descriptor.
    """

    BM: int
    BN: int
    BK: int
    last: int
    parts: int
    a_pieces: int
    a_transposed: bool
    a_descriptor: bool
    a_unit: int
    b_pieces: int
    b_transposed: bool
    b_descriptor: bool
    b_unit: int
    rows_along: str
    zero_dead: bool
    precision: str
    persistent: bool = False
    out_descriptor: bool = False


@functools.cache
def form_of(
    tile: Tile,
    a: Operand,
    b: Operand,
    last: int,
    rows_along: str,
    *,
    precision: str,
    zero_dead: bool = False,
    persistent: bool = False,
    out_descriptor: bool = False,
) -> Form:
    """A `Form` from its parts."""
    return Form(
        tile.BM,
        tile.BN,
        tile.BK,
        last,
        tile.parts,
        a.pieces,
        a.transposed,
        a.descriptor,
        a.unit,
        b.pieces,
        b.transposed,
        b.descriptor,
        b.unit,
        rows_along,
        zero_dead,
        precision,
        persistent,
        out_descriptor,
    )
