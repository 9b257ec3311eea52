"""The maps of a tree as ops read them: tensors, shapes and static names only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.mapping.errors import TreeError
from ikbo_tree.mapping.structure import Structure
from ikbo_tree.tree.host import HostMaps
from ikbo_tree.tree.schema import Schema, compose, routes_of, sizes_of


class TreeMaps:
    """Levels, tables and the maps between them; `BroadcastTree` adds how they are made.

    Every method that an op calls works while torch.compile and torch.export trace.
    """

    _schema: Schema
    _fields: tuple[Tensor, ...]
    _routes: dict[tuple[str, str], Route]
    _sizes: dict[str, int]
    _host: HostMaps | None

    def __init__(self) -> None:
        raise TypeError("use BroadcastTree.from_counts, from_parents, from_keys, ...")

    @classmethod
    def _from_fields(
        cls, schema: Schema, fields: tuple[Tensor, ...], host: HostMaps | None = None
    ) -> Self:
        tree = object.__new__(cls)
        tree._schema = schema
        tree._fields = fields
        tree._routes = routes_of(schema, fields)
        tree._sizes = sizes_of(schema, fields)
        tree._host = host
        return tree

    @property
    def structure(self) -> Structure:
        """Levels and how they hang together."""
        return self._schema.structure

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels, root first."""
        return self._schema.structure.levels

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the side tables."""
        return tuple(table.name for table in self._schema.tables)

    @property
    def device(self) -> torch.device:
        """Where the maps are."""
        return self._fields[0].device

    @property
    def is_sorted(self) -> bool:
        """Every parents map is non-decreasing, so every segment is one run of rows."""
        return self._schema.sorted

    def rows(self, level: str) -> int:
        """Live rows of a level or table, on the host.

        Raises:
            TreeError: no such level; or a tree with spare capacity inside a traced function,
                where only the device knows (use `capacity`).
        """
        self._known("level", level)
        if self._host is None and not self._schema.padded:
            return self._sizes[level]
        return self._host_maps().rows[level]

    def capacity(self, level: str) -> int:
        """Allocated rows of a level or table: what tensors at that level have.

        Raises:
            TreeError: no such level.
        """
        self._known("level", level)
        return self._sizes[level]

    def parent(self, level: str) -> str | None:
        """Name of the level above `level`; None for the root."""
        p = self.structure.parent[self.structure.at("level", level)]
        return None if p < 0 else self.levels[p]

    def parents(self, level: str) -> Tensor:
        """[capacity(level)] int32: each row's row in the level above.

        Raises:
            TreeError: no such level, or the root.
        """
        above = self.parent(level)
        if above is None:
            raise TreeError("level", "must not be the root, which has no parents", repr(level))
        return self.ancestors(level, of=above)

    def ancestors(self, level: str, *, of: str) -> Tensor:
        """[capacity(level)] int32: each row's row in the coarser level (or table) `of`.

        Raises:
            TreeError: `of` is not above `level`.
        """
        route = self.route(level, of)
        if route is None:
            return torch.arange(self.capacity(level), dtype=torch.int32, device=self.device)
        return route.index

    def offsets(self, level: str, *, of: str) -> Tensor:
        """[capacity(of) + 1] int32: where the rows of `level` below each row of `of` begin.

        They count into `order(level, of=of)` where that is not None.

        Raises:
            TreeError: `of` is not above `level`.
        """
        route = self.route(level, of)
        if route is None:
            return torch.arange(self.capacity(level) + 1, dtype=torch.int32, device=self.device)
        return route.offsets

    def order(self, level: str, *, of: str) -> Tensor | None:
        """[capacity(level)] int32: rows of `level` grouped by their row of `of`.

        None where the rows lie in that order already.

        Raises:
            TreeError: `of` is not above `level`.
        """
        route = self.route(level, of)
        return None if route is None else route.order

    def counts(self, level: str) -> Tensor:
        """[capacity(parent level)] int32: children in `level` of each row of its parent level."""
        above = self.parent(level)
        if above is None:
            raise TreeError("level", "must not be the root, which has no parents", repr(level))
        return self.offsets(level, of=above).diff()

    def keys(self, level: str) -> np.ndarray:
        """The key of each row, for levels and tables of a tree from `from_keys`.

        Raises:
            TreeError: the tree was made without keys.
        """
        self._known("level", level)
        keys = {} if self._host is None else self._host.keys
        if level not in keys:
            raise TreeError("level", f"must have keys: {sorted(keys)}", repr(level))
        return keys[level]

    def start(self, level: str) -> int:
        """Where the level's values begin in the buffer that `from_offsets` viewed; else 0."""
        self.structure.at("level", level)
        return 0 if self._host is None else self._host.starts.get(level, 0)

    def origin(self, level: str) -> Tensor:
        """[rows(level)] int32: rows of the tree that `select` took this tree's rows from.

        Raises:
            TreeError: this tree is not a selection.
        """
        self.structure.at("level", level)
        if self._host is None or level not in self._host.origins:
            raise TreeError("tree", "must come from select()", "a tree that does not")
        return torch.from_numpy(self._host.origins[level]).to(self.device)

    def route(self, level: str, of: str) -> Route | None:
        """The maps from `level` up to `of`, a level above it or a table; None where they are one.

        Raises:
            TreeError: `of` cannot be reached from `level`.
        """
        route = self._routes.get((level, of))
        if route is not None:
            return route
        self._known("level", level)
        self._known("of", of)
        if level == of:
            return None
        if level not in self.tables and of not in self.tables:
            structure = self.structure
            fine, coarse = structure.position[level], structure.position[of]
            if coarse in structure.lineage[fine]:
                return self._composed(fine, coarse)
        raise TreeError("of", f"must be above {level!r}: {self._reachable(level)}", repr(of))

    def live(self, name: str) -> Tensor | None:
        """[1] int32, the live rows of a level or table on the device; None: all rows are live."""
        self._known("level", name)
        if not self._schema.padded:
            return None
        if name in self.tables:
            return self._routes[self.table_level(name), name].live_coarse
        at = self.structure.position[name]
        return self._fields[0][at : at + 1]

    def table_level(self, table: str) -> str:
        """The level that a table hangs off.

        Raises:
            TreeError: no such table.
        """
        for entry in self._schema.tables:
            if entry.name == table:
                return self.levels[entry.of]
        raise TreeError("table", f"must be one of the tables {list(self.tables)}", repr(table))

    def chain(
        self, argument: str, names: Sequence[str], level: str | None = None
    ) -> tuple[str, ...]:
        """Levels and tables in the order in which ops combine them, coarse first.

        A table comes right before the level at which it joins: the coarsest one of the chain that
        is at or below the table's own level. The last entry is the level of the result: `level`,
        or the finest of `names` (a table counts as the level it hangs off).

        Args:
            argument: the caller's argument, for errors.
            names: levels and tables, in any order.
            level: level of the result, at or below all of them.

        Raises:
            TreeError: an unknown name, no name at all, or levels on different branches.
        """
        for name in names:
            self._known(argument, name)
        if not names:
            raise TreeError(argument, "must name at least one level", "none")
        structure = self.structure
        at = {
            name: structure.position[self.table_level(name) if name in self.tables else name]
            for name in names
        }
        depth = {name: len(structure.lineage[p]) for name, p in at.items()}
        last = structure.at("level", level) if level is not None else at[max(at, key=depth.get)]  # type: ignore[arg-type]
        for name in names:
            if at[name] != last and at[name] not in structure.lineage[last]:
                raise TreeError(
                    argument,
                    f"must lie on one path down to {self.levels[last]!r}",
                    f"{name!r} among {list(names)}",
                )
        # Tables sort before the level they hang off, and so before the next finer one.
        chain = sorted(names, key=lambda name: (depth[name], name not in self.tables))
        if self.levels[last] not in names:
            chain.append(self.levels[last])
        return tuple(chain)

    def check(self, argument: str, tensor: Tensor, name: str, *, dim: int = 0) -> None:
        """Raises a TreeError unless `tensor` has `capacity(name)` rows in `dim`, on this device."""
        if tensor.dim() <= dim or tensor.shape[dim] != self.capacity(name):
            raise TreeError(
                argument,
                f"must have {self.capacity(name)} rows (level {name!r}) in dim {dim}",
                f"shape {tuple(tensor.shape)}",
            )
        if tensor.device != self.device:
            raise TreeError(
                argument, f"must be on the tree's device {self.device}", str(tensor.device)
            )

    def _known(self, argument: str, name: str) -> None:
        if name not in self._sizes:
            raise TreeError(
                argument,
                f"must name one of the levels {list(self.levels)}"
                + (f" or tables {list(self.tables)}" if self.tables else ""),
                repr(name),
            )

    def _reachable(self, level: str) -> list[str]:
        if level in self.tables:
            return []
        structure = self.structure
        lineage = structure.lineage[structure.position[level]]
        return [self.levels[i] for i in lineage] + [
            t for t in self.tables if (level, t) in self._routes
        ]

    def _composed(self, fine: int, coarse: int) -> Route:
        """A pair that a deep tree does not carry: neighbours composed, on the device."""
        lineage = self.structure.lineage[fine]
        steps = (fine, *lineage[: lineage.index(coarse) + 1])
        routes = [
            self._routes[self.levels[low], self.levels[high]] for low, high in pairwise(steps)
        ]
        route = routes[0]
        for upper in routes[1:]:
            route = compose(route, upper)
        if not torch.compiler.is_compiling():
            self._routes[self.levels[fine], self.levels[coarse]] = route
        return route

    def _host_maps(self) -> HostMaps:
        """The host's copy; made from the device's (a sync) for a tree rebuilt from its tensors."""
        if self._host is None:
            if torch.compiler.is_compiling():
                raise TreeError(
                    "tree", "must not be asked for host data while traced", "a traced tree"
                )
            self._host = HostMaps.from_fields(self._schema, self._fields)
        return self._host
