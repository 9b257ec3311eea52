"""Tiles in a good order, for ops that take them: a hint, never a condition for being right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ikbo_tree.mapping import build, plans
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.tree.host import Integers, host_array

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree

PLANNED_OPS = ("target_attention",)
"""Ops that work in tiles of one segment's rows; the others have nothing to order."""


@dataclass(frozen=True)
class Plan:
    """Runs of rows of one segment each, in the order in which programs should take them.

    Attributes:
        op: what it was made for.
        level: the level whose rows are cut.
        of: the level whose rows own the segments.
        tile_rows: most rows of `level` a tile has.
        rows: rows of `level` that the tiles cover.
        segment: [tiles] int32, row of `of`.
        start: [tiles] int32, first row of the tile, an index into `order(level, of=of)` if the
            tree is unsorted.
        count: [tiles] int32, rows of the tile.
    """

    op: str
    level: str
    of: str
    tile_rows: int
    rows: int
    segment: Tensor
    start: Tensor
    count: Tensor


def plan(
    op: str,
    tree: BroadcastTree,
    *,
    level: str,
    of: str,
    tile_rows: int = 64,
    lengths: Integers | None = None,
    longest_first: bool = True,
) -> Plan:
    """Cuts every segment into tiles, the costliest first.

    Args:
        op: an op that works in tiles: `"target_attention"`.
        tree: the tree.
        level: level of the query rows.
        of: level that owns the K/V.
        tile_rows: most rows of `level` in a tile.
        lengths: [rows of `of`], keys each segment attends over; a tile's cost is its rows times
            them. Without it, its rows.
        longest_first: order by cost, ties in row order; else by row.

    Raises:
        TreeError: `of` is not above `level`, or lengths do not fit.
        ValueError: an op without tiles, or `tile_rows` below 1.
    """
    if op not in PLANNED_OPS:
        raise ValueError(f"op must be one of {', '.join(PLANNED_OPS)}; got {op!r}")
    if tile_rows < 1:
        raise ValueError(f"tile_rows must be at least 1; got {tile_rows}")
    offsets = tree.offsets(level, of=of).cpu().numpy()
    cost = None
    if lengths is not None:
        cost = build.as_integers("lengths", host_array("lengths", lengths))
        if len(cost) != len(offsets) - 1:
            raise TreeError("lengths", f"must have {len(offsets) - 1} entries", str(len(cost)))
    tiles = plans.cut_segments(offsets, tile_rows, longest_first=longest_first, cost=cost)
    segment, start, count = (torch.from_numpy(a).to(tree.device) for a in tiles)
    return Plan(op, level, of, tile_rows, tree.rows(level), segment, start, count)
