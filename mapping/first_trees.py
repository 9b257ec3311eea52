"""A process's first small trees, in NumPy: they are there before numba has been imported.

Importing numba and filling its registries takes 0.5 s. The first few trees from a few counts are
not worth it; the same functions as in `loops` (where their contracts are), 2 to 3 times slower.
"""

from __future__ import annotations

from itertools import count

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.integers import LIMIT
from ikbo_tree.mapping.layout import Int32

TREES = 16
"""So many trees are few: a server with one a request is past them before it has warmed up."""
COUNTS = 4096
"""So many counts are few: NumPy takes 0.1 ms."""

_made = count()


def suffices(counts: int) -> bool:
    """Whether the next tree, of so many counts, is one of the first small ones. Counts them."""
    return counts <= COUNTS and next(_made) < TREES


def count_rows(
    parent: NDArray[np.int64],
    counts: NDArray[np.int64],
    root_rows: int,
    rows: NDArray[np.int64],
) -> int:
    """As `loops.count_rows`."""
    rows[0] = root_rows
    at = 0
    for level in range(1, parent.size):
        own = counts[at : at + rows[parent[level]]]
        if len(own) < rows[parent[level]]:
            return level
        # No sum of so few counts that are in range wraps.
        if own.min(initial=0) < 0 or own.max(initial=0) > LIMIT or own.sum() > LIMIT:
            return level
        rows[level] = own.sum()
        at += len(own)
    return 0


def fill_counts(
    table: NDArray[np.int64],
    rows: NDArray[np.int64],
    capacity: NDArray[np.int64],
    counts: NDArray[np.int64],
    buffer: Int32,
) -> None:
    """As `loops.fill_counts`."""
    at = rows.size
    buffer[:at] = rows
    if rows.size == 1:
        buffer[at : at + rows[0]] = np.arange(rows[0])
        buffer[at + rows[0] :] = 0
    read = 0
    found: list[Int32] = []
    for fine, coarse, _, first, second in table:
        index = buffer[at : at + capacity[fine]]
        offsets = buffer[at + len(index) : at + len(index) + capacity[coarse] + 1]
        at += len(index) + len(offsets)
        n = rows[coarse]
        offsets[0] = 0
        if second < 0:
            np.cumsum(counts[read : read + n], out=offsets[1 : n + 1])
            read += n
        else:
            offsets[:n] = found[first][found[second][:n]]
        offsets[n:] = rows[fine]
        index[: rows[fine]] = np.repeat(np.arange(n), np.diff(offsets[: n + 1]))
        index[rows[fine] :] = 0
        found.append(offsets)
