"""One call of an op on a tree: its rows, and the parts that formulas are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.analysis.cost import Cost, Step
from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.tree import BroadcastTree

INDEX = 4
"""Bytes of an entry of a map."""

Lengths: TypeAlias = int | Sequence[int] | Tensor
"""Entries that each row of a level owns: one number for all, or one for each row."""


class Call:
    """A tree's rows as one op sees them.

    Attributes:
        tree: the tree.
        chain: names in the order in which they are combined, coarse first.
        last: the result's level.
        size: bytes of an element.
        wide: bytes of a partial result.
    """

    def __init__(
        self,
        tree: BroadcastTree,
        names: Sequence[str],
        level: str | None,
        dtype: torch.dtype,
        argument: str = "widths",
    ) -> None:
        self.tree = tree
        self.chain = tree.chain(argument, tuple(dict.fromkeys(names)), level)
        self.last = self.chain[-1]
        self.size = dtype.itemsize
        self.wide = accumulator(dtype).itemsize

    def rows(self, name: str | None = None) -> int:
        """Live rows of a level or table; default the result's."""
        return self.tree.rows(self.last if name is None else name)

    def above(self, name: str) -> list[str]:
        """The names that hand what they have to `name`: the next coarser level, and tables."""
        found = []
        for at, producer in enumerate(self.chain[:-1]):
            behind = (n for n in self.chain[at + 1 :] if n not in self.tree.tables)
            if next(behind) == name:
                found.append(producer)
        return found

    def gathered(self, name: str, to: str, width: int, size: int) -> int:
        """Bytes read where a kernel at `to` looks up rows of `name`: no more than it has, a map."""
        return min(self.rows(name), self.rows(to)) * width * size + INDEX * self.rows(to)

    def copy(self, name: str, width: int) -> Step:
        """The flat form's copy of a name to the result's level."""
        written = self.rows() * width * self.size
        cost = Cost(0, self.gathered(name, self.last, width, self.size) + written)
        return Step("broadcast", name, cost)

    def copies(self, widths: dict[str, int]) -> list[Step]:
        """Copies of all names that are not at the result's level, and their concatenation."""
        steps = [self.copy(name, width) for name, width in widths.items() if name != self.last]
        if len(widths) > 1:
            moved = 2 * self.rows() * sum(widths.values()) * self.size
            steps.append(Step("concatenate", self.last, Cost(0, moved)))
        return steps


def entries(argument: str, lengths: Lengths, tree: BroadcastTree, name: str) -> np.ndarray:
    """[live rows of a level or table] int64: what each row owns.

    Raises:
        TreeError: a negative number, or not one for each row.
    """
    rows = tree.rows(name)
    if isinstance(lengths, int):
        found = np.full(rows, lengths, np.int64)
    else:
        given = lengths.cpu().numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
        # Dead rows may have entries, of which none counts.
        fits = rows <= given.size <= tree.capacity(name)
        found = given.astype(np.int64).reshape(-1)[: rows if fits else None]
    if len(found) != rows:
        raise TreeError(argument, f"must have {rows} entries for {name!r}", str(len(found)))
    if (found < 0).any():
        raise TreeError(argument, "must not be negative", str(found.min()))
    return found


def seen(lengths: np.ndarray, tree: BroadcastTree, level: str, of: str) -> np.ndarray:
    """[live rows of `level`]: what the row of `of` above each of them owns."""
    index = tree.ancestors(level, of=of)[: tree.rows(level)].cpu().numpy()
    above: np.ndarray = lengths[index]
    return above
