"""Which rows' coarse results are kept, and where: least recently used out, versions exact."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ikbo_tree.errors import TreeError
from ikbo_tree.serving.merge import Identity

Key = int | str | bytes


class _Entry(NamedTuple):
    version: Key
    slot: int


@dataclass(frozen=True)
class Lookups:
    """What a cache did for one batch.

    Attributes:
        hits: rows whose results were there.
        misses: rows with a version whose results were not.
        unversioned: rows that can't be kept: without version, or with a key that a row before had.
        evicted: other rows' results that went to make room.
    """

    hits: int = 0
    misses: int = 0
    unversioned: int = 0
    evicted: int = 0


@dataclass(frozen=True)
class Placement:
    """Where a batch's results are.

    Attributes:
        slots: of each row.
        fresh: rows that must be computed and written to their slots, increasing.
        lookups: the counts.
    """

    slots: list[int]
    fresh: list[int]
    lookups: Lookups


class CoarseCache:
    """Slots of equal size for rows' results, in memory that its owner has.

    Slot 0 is nobody's: rows that do not exist point there. Slots 1 to `slots` are kept from batch
    to batch. Row i of a batch whose result is not kept gets slot `slots + 1 + i`.

    A key has one version at a time: another one takes its place. No batch's rows push out one
    another. Threads may call everything but `place` at any time; batches take turns.

    >>> cache = CoarseCache(max_bytes=2048, row_bytes=1024)
    >>> cache.place([("anna", 1), ("ben", 1), None])
    Placement(slots=[1, 2, 5], fresh=[0, 1, 2], lookups=Lookups(hits=0, misses=2, unversioned=1, \
evicted=0))
    >>> cache.place([("anna", 1), ("carl", 1)]).slots, "ben" in cache
    ([1, 2], False)
    >>> cache.place([("anna", 2)]).fresh
    [0]

    Args:
        max_bytes: of all that is kept; rounded down to whole rows.
        row_bytes: of one row's results.

    Raises:
        TreeError: a negative budget, or rows of no bytes.
    """

    def __init__(self, max_bytes: int, row_bytes: int) -> None:
        if max_bytes < 0:
            raise TreeError("max_bytes", "must not be negative", str(max_bytes))
        if row_bytes < 1:
            raise TreeError("row_bytes", "must be positive", str(row_bytes))
        self.row_bytes, self.slots = row_bytes, max_bytes // row_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # least recently used first
        self._free = list(range(self.slots, 0, -1))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return len(self) * self.row_bytes

    def place(self, rows: Sequence[Identity | None]) -> Placement:
        """Finds slots for a batch, and counts on its fresh rows to be written to theirs.

        Args:
            rows: key and version of each; None: not to be kept.
        """
        slots = [self.slots + 1 + at for at in range(len(rows))]
        first: dict[Key, int] = {}  # rows that may be kept, by key
        for at, row in enumerate(rows):
            if row is not None:
                first.setdefault(row[0], at)
        fresh, evicted, hits = set(range(len(rows))), 0, 0
        with self._lock:
            missing = []
            for key, at in first.items():
                version = rows[at][1]  # type: ignore[index]
                entry = self._entries.get(key)
                if entry is not None and entry.version == version:
                    self._entries.move_to_end(key)
                    slots[at] = entry.slot
                    fresh.discard(at)
                    hits += 1
                    continue
                if entry is not None:
                    self._release(key)
                missing.append((key, version, at))
            for key, version, at in missing:
                if not self._free and self._entries:
                    oldest = next(iter(self._entries))
                    if oldest not in first:
                        self._release(oldest)
                        evicted += 1
                if self._free:
                    slots[at] = self._free.pop()
                    self._entries[key] = _Entry(version, slots[at])
        lookups = Lookups(hits, len(missing), len(rows) - len(first), evicted)
        return Placement(slots, sorted(fresh), lookups)

    def forget(self, rows: Sequence[Identity | None], placement: Placement) -> None:
        """Takes back a placement whose fresh rows were not written."""
        with self._lock:
            for at in placement.fresh:
                row = rows[at]
                if row is not None:
                    entry = self._entries.get(row[0])
                    if entry is not None and entry.slot == placement.slots[at]:
                        self._release(row[0])

    def invalidate(self, key: Key) -> bool:
        """Drops what is kept for a key, for batches from now on; whether there was any."""
        with self._lock:
            if key not in self._entries:
                return False
            self._release(key)
            return True

    def clear(self) -> None:
        """Drops everything, for batches from now on."""
        with self._lock:
            for key in [*self._entries]:
                self._release(key)

    def _release(self, key: Key) -> None:
        self._free.append(self._entries.pop(key).slot)
