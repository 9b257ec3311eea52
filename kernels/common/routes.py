"""A route: how rows of a fine level find their rows in a coarse one, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Route(NamedTuple):
    """The maps between a fine level and a coarse one (or a table), all int32 on the ops' device.

    Three coarse rows with 3, 0 and 2 rows below them:

        index   = [0, 0, 0, 2, 2]     coarse row of each fine row
        offsets = [0, 3, 3, 5]        fine rows order[offsets[c]:offsets[c+1]] lie below c
        order   = None                they lie in that order already (a sorted tree)

    Where a tree has a capacity beyond its rows, `index` and `order` are capacity long, entries past
    the live count are 0, and `offsets` repeats the live fine count past the live coarse rows.

    Attributes:
        index: [fine].
        offsets: [coarse + 1].
        order: [fine], fine rows grouped by coarse row, ascending inside a group; None: 0, 1, 2, ...
        live_fine: [1], the live count of fine rows; None: all are live.
        live_coarse: [1], likewise.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    offsets: Tensor
    order: Tensor | None = None
    live_fine: Tensor | None = None
    live_coarse: Tensor | None = None

    @property
    def fine_rows(self) -> int:
        """Allocated rows of the fine level."""
        return self.index.shape[0]

    @property
    def coarse_rows(self) -> int:
        """Allocated rows of the coarse level."""
        return self.offsets.shape[0] - 1


def live_mask(rows: int, live: Tensor | None, like: Tensor) -> Tensor | None:
    """[rows, 1, ...] bool, true for live rows, with `like`'s rank; None where all are live."""
    if live is None:
        return None
    mask = torch.arange(rows, device=like.device, dtype=torch.int32) < live
    return mask.view(-1, *[1] * (like.dim() - 1))


def zero_dead_rows(x: Tensor, live: Tensor | None) -> Tensor:
    """`x` with zeros in its dead rows (contract 9), by selection, so that NaN there is dropped."""
    mask = live_mask(x.shape[0], live, x)
    return (
        x if mask is None else torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    )
