"""Which levels a tree has and how they hang together, apart from any rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.errors import TreeError

ALL_PAIRS_DEPTH = 8
"""Trees up to this depth carry the maps between every two levels; deeper ones carry the maps
between neighbours and compose the rest when asked, since pairs grow with the square of depth."""


@dataclass(frozen=True)
class Structure:
    """Levels, root first, each after its parent.

    `Structure(("user", "vendor", "item", "session"), (-1, 0, 1, 0))` is

        user ── vendor ── item
          └──── session

    Attributes:
        levels: the names.
        parent: position of each level's parent in `levels`; -1 for the root.
        position: position of each level in `levels`.
        lineage: for each level, the positions of its proper ancestors, nearest first.
        pairs: (fine, coarse) positions whose maps a tree carries; a level's nearest ancestor first.
        pair_at: position of each (fine, coarse) in `pairs`.
    """

    levels: tuple[str, ...]
    parent: tuple[int, ...]
    # Plain attributes: torch.compile reads them, and cannot trace the lock of a cached_property.
    position: dict[str, int] = field(init=False, repr=False, compare=False)
    lineage: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    pairs: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    pair_at: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chains: list[tuple[int, ...]] = []
        for p in self.parent:
            chains.append(() if p < 0 else (p, *chains[p]))
        deep = max(len(chain) for chain in chains) + 1 > ALL_PAIRS_DEPTH
        pairs = tuple(
            (fine, coarse)
            for fine, chain in enumerate(chains)
            for coarse in (chain[:1] if deep else chain)
        )
        derived = {
            "position": {name: i for i, name in enumerate(self.levels)},
            "lineage": tuple(chains),
            "pairs": pairs,
            "pair_at": {pair: i for i, pair in enumerate(pairs)},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def build(root: str, below: tuple[str, ...], under: Mapping[str, str] | None) -> Structure:
        """The structure of `root` and `below`, in their order.

        A level hangs under the one named before it unless `under` names another.

        Raises:
            TreeError: a name comes twice, is no string, or `under` names an unknown level or one
                that comes later.
        """
        levels = (root, *below)
        return _build(levels, tuple((under or {}).items()))

    def at(self, argument: str, level: str) -> int:
        """Position of `level`; a TreeError that names `argument` if there is none."""
        position = self.position.get(level)
        if position is None:
            raise TreeError(argument, f"must be one of the levels {list(self.levels)}", repr(level))
        return position

    @cached_property
    def parent_array(self) -> NDArray[np.int64]:
        """`parent` as the compiled loops read it."""
        return np.array(self.parent, dtype=np.int64)

    @cached_property
    def pair_table(self) -> NDArray[np.int64]:
        """[pairs, 5], a row a pair for the compiled loops: how its maps follow from earlier pairs.

        Columns: fine, coarse, parent of fine, position of the pair (fine, parent), position of the
        pair (parent, coarse), the last -1 where coarse is the parent.
        """
        rows = []
        for fine, coarse in self.pairs:
            above = self.parent[fine]
            far = self.pair_at[above, coarse] if coarse != above else -1
            rows.append((fine, coarse, above, self.pair_at[fine, above], far))
        return np.array(rows, dtype=np.int64).reshape(-1, 5)


@lru_cache(maxsize=512)
def _build(levels: tuple[str, ...], under: tuple[tuple[str, str], ...]) -> Structure:
    seen: dict[str, int] = {}
    for i, name in enumerate(levels):
        if not isinstance(name, str) or not name:
            raise TreeError("level names", "must be non-empty strings", repr(name))
        if name in seen:
            raise TreeError("level names", "must be distinct", f"{name!r} twice")
        seen[name] = i
    hangs = dict(under)
    for name in hangs:
        if name not in seen:
            raise TreeError("under", f"must name levels of {list(levels)}", repr(name))
        if seen[name] == 0:
            raise TreeError("under", "must not name the root", repr(name))
    parent = [-1]
    for i, name in enumerate(levels[1:], start=1):
        above = hangs.get(name, levels[i - 1])
        p = seen.get(above, len(levels))
        if p >= i:
            raise TreeError(
                f'under["{name}"]', f"must be a level before it: {list(levels[:i])}", repr(above)
            )
        parent.append(p)
    return Structure(levels, tuple(parent))
