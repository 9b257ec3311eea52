"""The static part of a tree: what its tensors are, apart from their values and sizes.

A tree travels through torch.compile and torch.export as a flat list of int32 tensors and one
`Schema`. The order of the tensors is fixed here:

    live [levels]
    for each (fine, coarse) of structure.pairs:  index [fine], offsets [coarse + 1],
                                                 order [fine] unless sorted
    for a tree of one level:                     index [root] (0, 1, 2, ...)
    for each table:                              live [1], then for its level and each level below:
                                                 index [level], offsets [table + 1], order [level]
    for a tree from padded requests:             positions [leaf] in the flattened padding
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.mapping.structure import Structure


@dataclass(frozen=True)
class TableSchema:
    """A side table: its name and the position of the level that it hangs off."""

    name: str
    of: int


@dataclass(frozen=True)
class Schema:
    """What the tensors of a tree are.

    Attributes:
        structure: the levels.
        sorted: every parents map is non-decreasing, so no `order` is carried.
        padded: there may be rows beyond the live counts, which live on the device.
        tables: side tables.
        positions: the tree came from padded requests and can pack and unpack.
    """

    structure: Structure
    sorted: bool
    padded: bool
    tables: tuple[TableSchema, ...] = ()
    positions: bool = False


@lru_cache(maxsize=512)
def levels_below(structure: Structure, of: int) -> tuple[int, ...]:
    """`of` and every level below it, in the structure's order."""
    return tuple(i for i in range(len(structure.levels)) if i == of or of in structure.lineage[i])


def routes_of(schema: Schema, fields: tuple[Tensor, ...]) -> dict[tuple[str, str], Route]:
    """The route of every pair of levels, and of levels and tables, that `fields` carry."""
    levels = schema.structure.levels
    live = fields[0].split(1) if schema.padded else (None,) * len(levels)
    routes: dict[tuple[str, str], Route] = {}
    at = 1
    for fine, coarse in schema.structure.pairs:
        order = None if schema.sorted else fields[at + 2]
        routes[levels[fine], levels[coarse]] = Route(
            fields[at], fields[at + 1], order, live[fine], live[coarse]
        )
        at += 2 if schema.sorted else 3
    if len(levels) == 1:
        at += 1
    for table in schema.tables:
        table_live = fields[at] if schema.padded else None
        at += 1
        for fine in levels_below(schema.structure, table.of):
            routes[levels[fine], table.name] = Route(
                fields[at], fields[at + 1], fields[at + 2], live[fine], table_live
            )
            at += 3
    return routes


def sizes_of(schema: Schema, fields: tuple[Tensor, ...]) -> dict[str, int]:
    """Allocated rows of every level and table, read from shapes (symbolic while tracing)."""
    levels = schema.structure.levels
    if len(levels) == 1:
        sizes = {levels[0]: fields[1].shape[0]}
        at = 2
    else:
        sizes = {}
        at = 1
        step = 2 if schema.sorted else 3
        for fine, coarse in schema.structure.pairs:
            sizes[levels[fine]] = fields[at].shape[0]
            sizes[levels[coarse]] = fields[at + 1].shape[0] - 1
            at += step
    for table in schema.tables:
        sizes[table.name] = fields[at + 2].shape[0] - 1
        at += 1 + 3 * len(levels_below(schema.structure, table.of))
    return sizes


def compose(lower: Route, upper: Route) -> Route:
    """Fine -> middle (`lower`) and middle -> coarse (`upper`) on their device."""
    index = upper.index[lower.index.long()]
    if lower.live_fine is not None:
        dead = torch.arange(index.shape[0], device=index.device) >= lower.live_fine
        index = index.masked_fill(dead, 0)
    if lower.order is None and upper.order is None:
        offsets = lower.offsets[upper.offsets.long()]
        return Route(index, offsets, None, lower.live_fine, upper.live_coarse)
    # Dead fine rows sort behind every segment.
    rank = index
    if lower.live_fine is not None:
        rank = index.masked_fill(dead, upper.coarse_rows)
    ordered, order = torch.sort(rank, stable=True)
    bounds = torch.arange(upper.coarse_rows + 1, device=index.device, dtype=torch.int32)
    offsets = torch.searchsorted(ordered.contiguous(), bounds).to(torch.int32)
    return Route(index, offsets, order.to(torch.int32), lower.live_fine, upper.live_coarse)
