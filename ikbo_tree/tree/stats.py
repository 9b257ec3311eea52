"""What a tree's shape means: fan-outs, and what a flat model would pay for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ikbo_tree.mapping.errors import TreeError

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class LevelStats:
    """One level of a tree.

    Attributes:
        rows: live rows.
        copies: rows of the finest level divided by `rows`: how often a flat model repeats a row.
        fan_out: children of a row of the parent level at the quantiles 0, 0.5, 0.9, 0.99, 1;
            empty for the root.
        mean_fan_out: their mean; 0 for the root.
        childless: rows of the parent level without a child here.
        extra_bytes: what broadcasting this level's elements to the finest level writes, beyond the
            level's own size.
        extra_flops: multiplications and additions that a linear map spends on the copies.
    """

    rows: int
    copies: float
    fan_out: tuple[float, ...]
    mean_fan_out: float
    childless: int
    extra_bytes: int
    extra_flops: int


@dataclass(frozen=True)
class TreeStats:
    """Fan-outs of a tree and the price of broadcasting it.

    Attributes:
        levels: by level name.
        finest: the level that a flat model copies everything to (the one with most rows).
    """

    levels: dict[str, LevelStats]
    finest: str

    @property
    def extra_bytes(self) -> int:
        """Bytes that a flat model writes for copies, all levels."""
        return sum(level.extra_bytes for level in self.levels.values())

    @property
    def extra_flops(self) -> int:
        """FLOPs that a flat linear map spends on copies, all levels."""
        return sum(level.extra_flops for level in self.levels.values())


def of_tree(
    tree: BroadcastTree, widths: Mapping[str, int] | None, out: int, dtype: torch.dtype
) -> TreeStats:
    """See `BroadcastTree.stats`.

    With `rows_l` rows of `widths[l]` elements at level l and F rows at the finest, broadcasting
    writes `(F - rows_l) * widths[l]` elements more than l holds, and a map to `out` columns spends
    `2 * (F - rows_l) * widths[l] * out` FLOPs more.
    """
    # The analysis imports trees.
    from ikbo_tree.analysis.cost import copies

    widths = widths or {}
    for name in widths:
        if name not in tree.levels:
            raise TreeError("widths", f"must name levels of {list(tree.levels)}", repr(name))
    finest = max(tree.levels, key=tree.rows)
    leaves = tree.rows(finest)
    levels = {}
    for level in tree.levels:
        rows = tree.rows(level)
        extra = copies(rows, leaves, widths.get(level, 1), dtype.itemsize, out)
        parent = tree.parent(level)
        fan = np.zeros(0)
        if parent is not None:
            fan = tree.counts(level)[: tree.rows(parent)].cpu().numpy()
        levels[level] = LevelStats(
            rows=rows,
            copies=leaves / rows if rows else 0.0,
            fan_out=tuple(np.quantile(fan, QUANTILES).tolist()) if fan.size else (),
            mean_fan_out=float(fan.mean()) if fan.size else 0.0,
            childless=int((fan == 0).sum()),
            extra_bytes=extra.bytes,
            extra_flops=extra.flops,
        )
    return TreeStats(levels, finest)
