"""Coarse parts of a model: run on a table's rows alone, their results kept from batch to batch.

Results of a table lie in one tensor a name, a row in each slot (see `CoarseCache`). A batch finds
or computes its rows' slots; the model then gathers them by a map, as it does everything coarse. So
cached rows move no memory on the host, and the gathering is captured with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

import ikbo_tree as ikbo
from ikbo_tree.errors import TreeError
from ikbo_tree.serving.buffers import Layout
from ikbo_tree.serving.cache import CoarseCache, Lookups, Placement
from ikbo_tree.serving.errors import ScoringError
from ikbo_tree.serving.graphs import captured
from ikbo_tree.serving.merge import Merged
from ikbo_tree.serving.signature import Coarse, Input, Signature

SLOT = "_slot"
"""Name of the input that has the slots which a chunk's rows go to."""


class Staged(nn.Module):
    """A model in parts: `coarse[table](**takes)` gives a dict, `model(tree=tree, **rest)` scores.

    Called as a whole it takes what requests have.

    Args:
        model: the part that scores, with what the coarse parts give among its arguments.
        coarse: a part for each table of `signature.coarse`; it may look at no other row.
        signature: of the whole.

    Raises:
        TreeError: parts of other tables than the signature has.
    """

    def __init__(
        self, model: nn.Module, coarse: Mapping[str, nn.Module], signature: Signature
    ) -> None:
        super().__init__()
        if coarse.keys() != signature.coarse.keys():
            raise TreeError("coarse", f"must be of {[*signature.coarse]}", str([*coarse]))
        self.model, self.signature = model, signature
        # No ModuleDict, which refuses names like "items".
        self._names, self._parts = tuple(coarse), nn.ModuleList(coarse.values())

    @property
    def coarse(self) -> dict[str, nn.Module]:
        """The parts by table."""
        return dict(zip(self._names, self._parts, strict=True))

    def forward(self, tree: ikbo.BroadcastTree, **inputs: Tensor) -> Tensor:
        """Scores [rows of the output level, ...]."""
        scores: Tensor = self.model(tree=tree, **self.behind(inputs))
        return scores

    def behind(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the scoring part takes, by name, of what requests have."""
        rest = dict(inputs)
        for table, part in self.coarse.items():
            declared = self.signature.coarse[table]
            taken = {name: rest.pop(name) for name in declared.takes}
            rest |= results(part, table, declared, taken)
        return rest


def results(
    part: Callable[..., Mapping[str, Tensor]],
    table: str,
    declared: Coarse,
    taken: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """What a coarse part gives for some rows.

    Raises:
        ScoringError: it is not what was declared.
    """
    found = part(**taken)
    rows = len(next(iter(taken.values())))
    wanted = {n: (rows, *given.shape) for n, given in declared.gives.items()}
    shapes = {name: tuple(x.shape) for name, x in found.items()}
    if shapes != wanted:
        raise ScoringError(f"coarse part {table!r} must give {wanted}; got {shapes}")
    for name, given in declared.gives.items():
        if found[name].dtype != given.dtype:
            raise ScoringError(
                f"coarse part {table!r} must give {name} as {given.dtype}; got {found[name].dtype}"
            )
    return dict(found)


class CoarseStage:
    """Runs coarse parts before a batch of at most `capacity` rows is scored.

    Args:
        model: the parts.
        capacity: most rows of each table.
        device: where they run.
        cache_bytes: kept of each table; room for one batch comes on top.
        chunk_rows: rows that a part is run on at a time, always so many, filled up by rows that
            nobody asked for: then a row's bits do not depend on how many are missing.
    """

    def __init__(
        self,
        model: Staged,
        capacity: Mapping[str, int],
        *,
        device: torch.device,
        cache_bytes: int,
        chunk_rows: int,
    ) -> None:
        if chunk_rows < 2:  # exported programs may have been specialised against 1
            raise TreeError("chunk_rows", "must be at least 2", str(chunk_rows))
        self._model = model
        signature = model.signature
        self.tables = {
            table: _Table(
                part,
                signature,
                table,
                capacity[table],
                device=device,
                cache=CoarseCache(cache_bytes, signature.coarse[table].row_bytes),
                chunk_rows=chunk_rows,
            )
            for table, part in model.coarse.items()
        }
        taken = {name for declared in signature.coarse.values() for name in declared.takes}
        inputs = {name: given for name, given in signature.inputs.items() if name not in taken}
        for table, kept in self.tables.items():
            inputs[_slots(table)] = Input(table, torch.int64, bounds=(0, kept.rows - 1))
        self.signature = replace(signature, inputs=inputs, coarse={})
        """Of `score`: slots in place of what coarse parts give."""

    def prepared(self, merged: Merged) -> tuple[Merged, dict[str, Lookups], int]:
        """Computes what is missing; on a GPU it is only launched.

        Returns:
            The batch as `score` takes it, what the caches did, and the bytes copied to the device.
        """
        slots, lookups, copied = {}, {}, 0
        for table, kept in self.tables.items():
            slots[_slots(table)], lookups[table], moved = kept.slots(merged)
            copied += moved
        return replace(merged, extra=slots), lookups, copied

    def score(self, tree: ikbo.BroadcastTree, **inputs: Tensor) -> Tensor:
        """Scores; the coarse parts' results are gathered from their slots."""
        for table, kept in self.tables.items():
            at = inputs.pop(_slots(table))
            inputs |= {name: slab.index_select(0, at) for name, slab in kept.slabs.items()}
        scores: Tensor = self._model.model(tree=tree, **inputs)
        return scores


def _slots(table: str) -> str:
    return f"__slots_of_{table}__"


class _Table:
    """One table's part, its results and the memory of a chunk."""

    def __init__(
        self,
        part: Callable[..., Mapping[str, Tensor]],
        signature: Signature,
        table: str,
        capacity: int,
        *,
        device: torch.device,
        cache: CoarseCache,
        chunk_rows: int,
    ) -> None:
        self.cache, self._part, self._name = cache, part, table
        self._declared, self._chunk_rows = signature.coarse[table], chunk_rows
        # Slot 0 for rows that do not exist, the cache's, one batch's, and one for filled-up rows.
        self.rows = cache.slots + capacity + 2
        self.slabs = {
            name: torch.zeros((self.rows, *given.shape), dtype=given.dtype, device=device)
            for name, given in self._declared.gives.items()
        }
        inputs = {name: signature.inputs[name] for name in self._declared.takes}
        inputs[SLOT] = Input(table, torch.int64, bounds=(0, self.rows - 1))
        layout = Layout({name: (chunk_rows, given) for name, given in inputs.items()})
        chunks = -(-capacity // chunk_rows)
        host = torch.zeros(
            (chunks, layout.nbytes), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._host, self._chunks = host, [layout.views(chunk) for chunk in host]
        for chunk in self._chunks:
            for name, given in inputs.items():
                chunk[name].fill_(self.rows - 1 if name == SLOT else given.filling)
        self._there = host[0] if device.type == "cpu" else host[0].to(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            there = layout.views(self._there)
            self._graph, _ = captured(lambda: self._run(there))
        else:  # whatever is compiled at a first call
            self._run(self._chunks[0])

    def slots(self, merged: Merged) -> tuple[Tensor, Lookups, int]:
        """Every row's slot [rows of the table], which has its results; lookups; bytes copied."""
        rows = merged.identities(self._name)
        placement = self.cache.place(rows)
        try:
            copied = self._compute(merged, placement)
        except BaseException:
            self.cache.forget(rows, placement)
            raise
        return torch.tensor(placement.slots, dtype=torch.int64), placement.lookups, copied

    def _compute(self, merged: Merged, placement: Placement) -> int:
        """Writes fresh rows' results to their slots; bytes copied to the device."""
        fresh, size, copied = placement.fresh, self._chunk_rows, 0
        if not fresh:
            return 0
        taken = {name: merged.take(name, fresh) for name in self._declared.takes}
        taken[SLOT] = torch.tensor([placement.slots[row] for row in fresh], dtype=torch.int64)
        for number, begin in enumerate(range(0, len(fresh), size)):
            chunk = self._chunks[number]
            live = min(size, len(fresh) - begin)
            for name, values in taken.items():
                chunk[name][:live] = values[begin : begin + live]
            chunk[SLOT][live:] = self.rows - 1
            if self._graph is None:
                self._run(chunk)
            else:
                self._there.copy_(self._host[number], non_blocking=True)
                self._graph.replay()
                copied += self._there.nbytes
        return copied

    def _run(self, chunk: Mapping[str, Tensor]) -> None:
        taken = {name: chunk[name] for name in self._declared.takes}
        for name, found in results(self._part, self._name, self._declared, taken).items():
            self.slabs[name].index_copy_(0, chunk[SLOT], found)
