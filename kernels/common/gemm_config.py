"""Choice of a tile for a matrix product, by its role, the architecture, dtype and widths.

Never by row counts: the rows of a request have the same bits in any batch (contract 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ikbo_tree.kernels.common import tuned
from ikbo_tree.kernels.common.gemm_forms import Tile, multiprocessors

ROLES = ("forward", "partial", "input_gradient", "weight_gradient")
"""The last stage, an earlier stage, the gradient of an input, of a weight."""


@dataclass(frozen=True)
class Choice:
    """A tile and how it reads.

    Attributes:
        tile: tile sizes.
        descriptors: whether operands may come as descriptors.
        resident: programs that a multiprocessor holds at a time.
    """

    tile: Tile
    descriptors: bool = False
    resident: int = 1

    def slots(self, device: torch.device) -> int:
        """Programs that the device runs at a time."""
        return self.resident * multiprocessors(device)

    def fitted(self, M: int, N: int) -> Choice:
        """The same for a product of M rows and N columns."""
        return Choice(self.tile.fitted(M, N), self.descriptors, self.resident)


def tuned_choice(op: str, role: str, arch: str, dtype: torch.dtype, *sizes: int) -> Choice | None:
    """What `ikbo-tree tune` chose for a call, or None."""
    fields = tuned.entry(op, role, arch, dtype, *sizes)
    if fields is None:
        return None
    return Choice(Tile(**fields["tile"]), fields["descriptors"], fields["resident"])


Table = Mapping[str, Mapping[str, Choice]]
"""Choices by role, by architecture."""


def family(arch: str, dtype: torch.dtype) -> str:
    """Key of a `Table`: architectures that share their tiles, or `"float32"`.

    float32 products run on the ordinary cores everywhere (TF32 only where torch is told to).
    """
    if arch == "interpreter":
        return arch
    if dtype == torch.float32:
        return "float32"
    if arch.startswith("gfx"):
        return "gfx"
    number = int(arch.removeprefix("sm_"))
    if number >= 90:
        return "sm_90"
    return "sm_80" if number in (80, 87) else "sm_86"


SMALL = Choice(
    Tile(BM=32, BN=32, BK=16, warps=1, stages=1, parts=2, short=True, least_last=16), True
)
"""In the interpreter: small tests have several tiles each way and every form of operand."""

SMALL_PERSISTENT = Choice(
    Tile(BM=32, BN=32, BK=16, warps=1, stages=1, persistent=True, described_out=True), True
)
"""Likewise, and programs that take several tiles."""
