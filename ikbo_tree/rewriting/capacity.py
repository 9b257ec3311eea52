"""Rows beyond the live ones, of trees with a capacity: what a rewritten model does about them.

Such rows of an input become copies of its first row (zeros where no row is live), so that nothing
they hold is read: no NaN, no id out of range. All ops then run on rows that are of the kind the
model was made for. In results they are zero. That is right if no op takes rows together, which
`lineage` says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ikbo_tree.rewriting.builder import Builder, aten
from ikbo_tree.rewriting.errors import RefusedError
from ikbo_tree.rewriting.lineage import Found, Mixture, Place
from ikbo_tree.rewriting.refusals import source
from ikbo_tree.rewriting.values import Merged, shape


class Capacity:
    """Live counts of a tree's levels.

    Args:
        build: writes the new graph.
        live: for each level a node [1] int32.
    """

    def __init__(self, build: Builder, live: Mapping[str, fx.Node]) -> None:
        self.build = build
        self.live = live

    def entering(self, x: fx.Node, level: str, *, map_or_counts: bool) -> fx.Node:
        """An input with rows of a level in dim 0; in maps and counts dead entries become 0."""
        if level not in self.live:
            return x
        call = self.build.call
        rows = self._rows(x, 0)
        mask = call(aten.lt.Tensor, rows, self.live[level])
        x = self._selected(mask, x, 0, Merged())
        if map_or_counts:
            return x
        return call(aten.index_select.default, x, 0, call(aten.where.ScalarOther, mask, rows, 0))

    def leaving(self, y: fx.Node, found: Found) -> fx.Node:
        """A result, with zeros in its dead rows.

        Raises:
            RefusedError: rows were taken together on the way.
        """
        if isinstance(found, Mixture):
            packet = getattr(found.node.target, "overloadpacket", found.node.target)
            raise RefusedError(
                f"{packet} {found.why} of level {found.level!r}, and a tree with capacity has "
                f"rows that must not count{source(found.node)}"
            )
        if not isinstance(found, Place) or found.level not in self.live:
            return y
        outer, inner = found.merged
        rows = self._rows(y, found.dim, outer * inner)
        mask = self.build.call(aten.lt.Tensor, rows, self.live[found.level])
        return self._selected(mask, y, found.dim, found.merged)

    def _rows(self, x: fx.Node, dim: int, many: int = 1) -> fx.Node:
        """0, 1, 2, ..., one for each row."""
        size = self.build.divided(self.build.size(x, dim), many)
        device = x.meta["val"].device
        return self.build.call(aten.arange.default, size, dtype=torch.int32, device=device)

    def _selected(self, mask: fx.Node, x: fx.Node, dim: int, merged: Merged) -> fx.Node:
        """`x` where the rows' mask is true, else 0."""
        mask = self.build.spread(mask, merged, len(shape(x)) - dim - 1)
        nothing: object = False if x.meta["val"].dtype == torch.bool else 0
        return self.build.call(aten.where.ScalarOther, mask, x, nothing)
