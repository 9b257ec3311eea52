"""How many rows levels may have: named dims for torch.export, sizes to choose by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.export import Dim

from ikbo_tree.errors import TreeError


class Range(NamedTuple):
    """Rows of one level.

    Attributes:
        least: the fewest that a call may have.
        usual: what calls have most often; what pays is decided on it.
        most: the most.
    """

    least: int
    usual: int
    most: int

    @property
    def fixed(self) -> bool:
        """Whether every call has the same."""
        return self.least == self.most


def checked(given: Mapping[str, Sequence[int]], levels: Sequence[str]) -> dict[str, Range]:
    """Ranges of some levels, coarse first.

    Raises:
        TreeError: an unknown level, or not three numbers in order.
    """
    found = {}
    for level, rows in given.items():
        if level not in levels:
            raise TreeError("rows", f"must name levels of {list(levels)}", repr(level))
        whole = all(isinstance(n, int) for n in rows)
        if len(rows) != 3 or not whole or not 0 <= rows[0] <= rows[1] <= rows[2]:
            raise TreeError(f'rows["{level}"]', "must be (least, usual, most)", repr(rows))
        found[level] = Range(*rows)
    return {level: found[level] for level in levels if level in found}


def dims(levels: Iterable[str], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """A named Dim a level, or its number where it has just one.

    Raises:
        TreeError: a level with at most one row, which torch.export cannot leave open.
    """
    found: dict[str, Any] = {}
    for i, level in enumerate(levels):
        name = f"rows_{level}"
        if not name.isidentifier():
            name = re.sub(r"\W", "_", f"{name}_{i}")
        own = ranges.get(level)
        if own is None:
            found[level] = Dim(name)
        elif own.fixed:
            found[level] = own.most
        elif own.most < 2:
            rule = "must reach 2, or be one number, to be exported"
            raise TreeError(f'rows["{level}"]', rule, str(tuple(own)))
        else:
            found[level] = Dim(name, min=own.least, max=own.most)
    return found
