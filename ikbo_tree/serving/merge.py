"""Many requests as one batch: rows one after the other, equal coarse rows once.

Why tables: the same user in two requests could also become one root row with the candidates of
both. That changes what a model sees that looks at a user's other candidates, and on a GPU may
change how a root row's work is cut. A table leaves every request its own sub-tree, so any model
keeps its scores, and whatever is computed from table rows is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.serving.errors import TooLargeError
from ikbo_tree.serving.request import Checked
from ikbo_tree.serving.signature import Signature
from ikbo_tree.tree import BroadcastTree

Identity = tuple[int | str | bytes, int | str | bytes]
"""Key and version of a row."""


@dataclass(frozen=True)
class Table:
    """Distinct rows of a level.

    Attributes:
        index: [rows of the level], the table row of each.
        first: [rows of the table], the level's row that each was first seen at, increasing.
    """

    index: NDArray[np.int64]
    first: NDArray[np.int64]


@dataclass(frozen=True)
class Merged:
    """Requests one after the other.

    Attributes:
        signature: of the model.
        parts: the requests.
        counts: of all of them, by level.
        rows: of every level and table.
        tables: by name.
        extra: inputs of the model that no request has, by name.
    """

    signature: Signature
    parts: Sequence[Checked]
    counts: dict[str, NDArray[np.int64]]
    rows: dict[str, int]
    tables: dict[str, Table]
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def tree(self, capacity: Mapping[str, int]) -> BroadcastTree:
        """The tree of the batch, on the CPU, with live counts below `capacity`."""
        tree = BroadcastTree.from_counts(
            self.counts,
            root=self.signature.root,
            root_rows=self.rows[self.signature.root],
            under=self.signature.parents,
            capacity={level: capacity[level] for level in self.signature.levels},
        )
        for name, table in self.tables.items():
            tree = tree.with_table(
                name,
                of=self.signature.tables[name],
                index=table.index,
                rows=len(table.first),
                capacity=capacity[name],
            )
        return tree

    def write(self, name: str, out: Tensor) -> None:
        """Puts an input's rows into `out` [rows of its level or table, ...]."""
        if name in self.extra:
            out.copy_(self.extra[name])
            return
        pieces = [part.inputs[name] for part in self.parts]
        at = self.signature.inputs[name].at
        if at in self.tables and len(self.tables[at].first) < len(self.tables[at].index):
            first = torch.from_numpy(self.tables[at].first)
            torch.index_select(torch.cat(pieces), 0, first, out=out)
        else:
            torch.cat(pieces, out=out)

    def identities(self, table: str) -> list[Identity | None]:
        """For each row of a table its key and version; None where it has no version."""
        level = self.signature.tables[table]
        found: list[Identity | None] = []
        for part in self.parts:
            if level in part.versions:
                pairs = zip(part.keys[level].tolist(), part.versions[level].tolist(), strict=True)
                found += pairs
            else:
                found += [None] * part.rows[level]
        return [found[row] for row in self.tables[table].first.tolist()]

    def take(self, name: str, rows: Sequence[int]) -> Tensor:
        """An input's values [len(rows), ...] for some rows of its table, increasing."""
        at = self.signature.inputs[name].at
        level = self.signature.tables[at]
        ends = np.cumsum([part.rows[level] for part in self.parts])
        wanted = self.tables[at].first[np.asarray(rows, dtype=np.int64)]
        bounds = np.searchsorted(wanted, [0, *ends])
        pieces = [
            part.inputs[name][torch.from_numpy(wanted[low:high] - end + part.rows[level])]
            for part, end, low, high in zip(self.parts, ends, bounds[:-1], bounds[1:], strict=True)
            if low < high
        ]
        return torch.cat(pieces)

    def split(self, scores: Tensor) -> list[Tensor]:
        """Scores [rows of the output level, ...] of each request, in its caller's order."""
        sizes = [part.rows[self.signature.output] for part in self.parts]
        return list(scores.split(sizes))

    @property
    def bytes_not_moved(self) -> int:
        """Bytes more that copies of every input to the output level would have had."""
        leaves = self.rows[self.signature.output]
        return sum(
            max(leaves - self.rows[given.at], 0) * given.row_bytes
            for given in self.signature.inputs.values()
        )


def merge(signature: Signature, parts: Sequence[Checked]) -> Merged:
    """The batch of some requests that passed `check`, at least one."""
    counts = {
        level: np.concatenate([part.counts[level] for part in parts]) for level in signature.parents
    }
    rows = {level: sum(part.rows[level] for part in parts) for level in signature.levels}
    tables = {name: _table(signature, name, parts) for name in signature.tables}
    rows |= {name: len(table.first) for name, table in tables.items()}
    return Merged(signature, parts, counts, rows, tables)


def _table(signature: Signature, table: str, parts: Sequence[Checked]) -> Table:
    """Distinct rows of a level by key; equal keys with different inputs stay apart."""
    level = signature.tables[table]
    total = sum(part.rows[level] for part in parts)
    first = np.arange(total)
    keyed, columns, start = [], [], 0
    for part in parts:
        if level in part.keys and part.rows[level]:
            keyed.append(np.arange(start, start + part.rows[level]))
            columns.append(part.keys[level])
        start += part.rows[level]
    if columns:
        at = np.concatenate(keyed)
        _, seen, which = np.unique(np.concatenate(columns), return_index=True, return_inverse=True)
        first[at] = at[seen[which]]
        again = np.flatnonzero(first != np.arange(total))
        # A key names a row; its bytes decide: what two callers know about it may differ.
        different = again[~_equal(signature, table, parts, again, first[again])]
        first[different] = different
    distinct = np.flatnonzero(first == np.arange(total))
    return Table(np.searchsorted(distinct, first), distinct)


def _equal(
    signature: Signature,
    table: str,
    parts: Sequence[Checked],
    left: NDArray[np.int64],
    right: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Whether rows `left` and `right` have the same bytes in every input of the table."""
    equal = np.ones(len(left), dtype=np.bool_)
    if not left.size:
        return equal
    for name, given in signature.inputs.items():
        if given.at == table and given.row_bytes:
            rows = torch.cat([part.inputs[name] for part in parts])
            flat = rows.reshape(len(rows), -1).view(torch.uint8)
            same = flat[torch.from_numpy(left)] == flat[torch.from_numpy(right)]
            equal &= same.all(1).numpy()
    return equal


def fits(rows: Mapping[str, int], capacity: Mapping[str, int]) -> bool:
    """Whether every level has room."""
    return all(capacity[level] >= n for level, n in rows.items() if level in capacity)


def cut(signature: Signature, request: Checked, capacity: Mapping[str, int]) -> list[Checked]:
    """The request, or where it is too large, parts whose scores in turn are its scores.

    Raises:
        TooLargeError: one root row has more below it than fits, and its candidates must not be
            parted.
    """
    if fits(request.rows, capacity):
        return [request]
    tree = merge(signature, [request]).tree({**request.rows, **_tables(signature, request.rows)})
    if signature.independent and signature.is_chain and signature.output == signature.levels[-1]:
        level = signature.output
        row = {
            name: tree.ancestors(level, of=name).numpy().astype(np.int64)
            for name in signature.levels
        }
        runs = _runs(row, row, request.rows[level], capacity)
    else:
        level = signature.root
        begins = {
            name: tree.offsets(name, of=level).numpy().astype(np.int64)
            for name in signature.parents
        }
        begins[level] = np.arange(request.rows[level] + 1)
        ends = {name: x[1:] - 1 for name, x in begins.items()}
        runs = _runs(begins, ends, request.rows[level], capacity)
    return [_part(signature, request, tree, level, run) for run in runs or [range(0)]]


def _runs(
    first: Mapping[str, NDArray[np.int64]],
    last: Mapping[str, NDArray[np.int64]],
    rows: int,
    capacity: Mapping[str, int],
) -> list[range]:
    """Runs of rows, each as long as fits: row i needs rows `first[i]` to `last[i]` of a level."""
    runs, begin = [], 0
    while begin < rows:
        end = rows
        for name, of in last.items():
            room = int(first[name][begin]) + capacity[name]
            end = min(end, int(np.searchsorted(of[:rows], room)))
        if end <= begin:
            need = {name: int(last[name][begin] - first[name][begin] + 1) for name in last}
            rule = f"must fit the server's {dict(capacity)} rows, one root row at a time"
            raise TooLargeError("counts", rule, str(need))
        runs.append(range(begin, end))
        begin = end
    return runs


def _part(
    signature: Signature, request: Checked, tree: BroadcastTree, level: str, run: range
) -> Checked:
    """The rows of the request that a run of one level's rows needs."""
    part = tree.select(**{level: np.arange(run.start, run.stop)})
    origin = {name: part.origin(name).long() for name in signature.levels}
    counts = {
        name: part.counts(name)[: part.rows(above)].numpy().astype(np.int64)
        for name, above in signature.parents.items()
    }
    inputs = {
        name: request.inputs[name][origin[signature.level_of(given.at)]]
        for name, given in signature.inputs.items()
    }
    keys, versions = (
        {name: column[origin[name].numpy()] for name, column in columns.items()}
        for columns in (request.keys, request.versions)
    )
    rows = {name: part.rows(name) for name in signature.levels}
    return Checked(counts, inputs, keys, rows, versions=versions)


def _tables(signature: Signature, rows: Mapping[str, int]) -> dict[str, int]:
    return {name: rows[level] for name, level in signature.tables.items()}
