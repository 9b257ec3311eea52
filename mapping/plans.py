"""Plans: segments cut into tiles, in an order that balances what programs do."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.build import loops
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.integers import LIMIT, as_integers, as_rows, first
from ikbo_tree.mapping.layout import Int32


class Tiles(NamedTuple):
    """Runs of rows, each of one segment.

    Offsets [0, 5, 5, 7] cut at 4 rows:

        segment = [0, 0, 2]
        start   = [0, 4, 5]
        rows    = [4, 1, 2]

    Attributes:
        segment: int32 [tiles].
        start: int32 [tiles], first row, counted as the offsets are.
        rows: int32 [tiles], from 1 to the most that a tile may have.
    """

    segment: Int32
    start: Int32
    rows: Int32


def cut_segments(
    offsets: Any, tile_rows: int, *, longest_first: bool = False, cost: Any = None
) -> Tiles:
    """Cuts each segment into runs of at most `tile_rows` rows, all but its last run full.

    Args:
        offsets: [segments + 1], non-decreasing, any integer dtype.
        tile_rows: the most rows of a tile, at least 1.
        longest_first: costliest tiles first, equal ones in row order; else all in row order.
        cost: [segments], what one row of the segment costs (its K/V length, say); None: 1.

    Returns:
        The tiles; none for an empty segment.

    Raises:
        TreeError: offsets that decrease, are negative or pass 2^31 - 1, a `tile_rows` below 1, a
            negative or misshapen cost.
    """
    given = as_integers("offsets", offsets)
    tile_rows = as_rows("tile_rows", tile_rows)
    if tile_rows < 1:
        raise TreeError("tile_rows", "must be at least 1", str(tile_rows))
    if not given.size:
        raise TreeError("offsets", "must have at least one entry", "none")
    start, end = int(given[0]), int(given[-1])
    if start < 0 or end > LIMIT:
        raise TreeError("offsets", "must be from 0 to 2^31 - 1", f"{start} to {end}")
    bound = max(end - start, 0) // tile_rows + given.size - 1
    tiles = np.empty((3, bound), dtype=np.int32)
    count = loops().cut(given, tile_rows, tiles)
    if count < 0:
        at = first(given[1:] < given[:-1]) + 1
        raise TreeError(
            "offsets", "must not decrease", f"{given[at]} after {given[at - 1]} at position {at}"
        )
    tiles = tiles[:, :count]
    if longest_first:
        order = np.argsort(-_costs(tiles, given.size - 1, cost), kind="stable")
        tiles = tiles.take(order, axis=1)
    return Tiles(tiles[0], tiles[1], tiles[2])


def _costs(tiles: Int32, segments: int, cost: Any) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = tiles[2].astype(np.int64)
    if cost is None:
        return rows
    each = as_integers("cost", cost)
    if each.size != segments:
        rule = f"must have one entry for each of the {segments} segments"
        raise TreeError("cost", rule, f"{each.size} entries")
    at = first((each < 0) | (each > LIMIT))
    if at >= 0:
        raise TreeError("cost", "must be from 0 to 2^31 - 1", f"{each[at]} at position {at}")
    costs: NDArray[np.int64] = rows * each[tiles[0]]
    return costs
