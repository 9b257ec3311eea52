"""How segments become calls of dense attention, decided on the host.

All query rows of a segment are one sequence over its keys. Segments that follow each other with
equal sizes are a view, without a copy: a uniform tree is one chunk. Of the others, large ones go
alone, again without a copy; small ones are gathered together with others of about their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.kernels.target_attention.memories import Memory

Indices = NDArray[np.int64]

ALONE = 1 << 14
"""Elements of q, k and v from which a chunk is taken without a copy: below, gathering many segments
into one call costs less than a call each (about 25 microseconds)."""
BUCKETS_AN_OCTAVE = 4
"""Gathered segments differ in rows, and in keys, by at most this fraction of an octave (19 %)."""


@dataclass(frozen=True, eq=False)
class Spans:
    """Where the query rows, or the keys, of each segment lie: `count` entries from `start` on.

    Attributes:
        start: [segments].
        count: [segments].
        index: what the entries are, [entries]; None: entry i is position i.
        pitch: distance between the starts of neighbouring segments that makes a block of them a
            view: the padded length, or None where they have to touch.
    """

    start: Indices
    count: Indices
    index: Tensor | None = None
    pitch: int | None = None

    def follows(self) -> NDArray[np.bool_]:
        """[segments - 1]: the next segment has as many entries and lies one pitch further."""
        count = self.count[:-1]
        pitch = count if self.pitch is None else self.pitch
        follows: NDArray[np.bool_] = (count == self.count[1:]) & (
            self.start[:-1] + pitch == self.start[1:]
        )
        return follows

    def take(self, which: Indices) -> Spans:
        """The spans of these segments only."""
        return replace(self, start=self.start[which], count=self.count[which])


class Piece(NamedTuple):
    """One side of a chunk: `batch` segments of `width` entries.

    Attributes:
        batch: segments.
        width: entries of each; of the longest, where they differ.
        start: the first entry of a block without gaps.
        positions: [batch * width] entries to gather, or None. A short segment's last one is
            repeated, so that nothing foreign comes in.
        valid: [batch, width] bool, false for the repetitions; None: there are none.
    """

    batch: int
    width: int
    start: int
    positions: Tensor | None = None
    valid: Tensor | None = None


class Chunk(NamedTuple):
    """Segments for one call: their query rows and their keys."""

    rows: Piece
    keys: Piece


def host(x: Tensor) -> Indices:
    """An integer map on the host; waits for its device."""
    return x.detach().cpu().numpy().astype(np.int64, copy=False)


def row_spans(memory: Memory, rows: int, live: Tensor | None) -> Spans:
    """The query rows that attend to each row of the memory; dead ones are nobody's."""
    if memory.offsets is None:
        count = np.ones(rows, np.int64)
        if live is not None:
            count[int(live) :] = 0
        return Spans(np.arange(rows), count)
    offsets = host(memory.offsets)
    return Spans(offsets[:-1], np.diff(offsets), memory.order)


def key_spans(memory: Memory) -> Spans:
    """The keys of each row of the memory, without the masked ones."""
    k = memory.k
    pitch: int | None = None
    if memory.packed:
        assert memory.extent is not None
        bounds = host(memory.extent).clip(0, k.shape[0])
        start, count = bounds[:-1], np.diff(bounds).clip(0)
    else:
        rows, pitch = k.shape[:2]
        start = np.arange(rows) * pitch
        if memory.extent is None:
            count = np.full(rows, pitch)
        else:
            count = host(memory.extent).clip(0, pitch)
    if memory.mask is None:
        return Spans(start, count, None, pitch)
    positions = memory.mask.flatten().nonzero().flatten()
    known = host(positions)
    first = np.searchsorted(known, start)
    return Spans(first, np.searchsorted(known, start + count) - first, positions)


def chunks(
    rows: Spans, keys: Spans, row_width: int, key_width: int, limit: int, device: torch.device
) -> Iterator[Chunk]:
    """The work of one memory, segments without rows or without keys left out.

    Args:
        rows: query rows of each segment.
        keys: keys of each segment.
        row_width: elements that a query row has.
        key_width: elements that a key and its value have.
        limit: most elements of a chunk of more than one segment.
        device: where indices go.
    """
    some = np.flatnonzero((rows.count > 0) & (keys.count > 0))
    if some.size == 0:
        return
    if some.size < rows.count.size:
        rows, keys = rows.take(some), keys.take(some)
    cost = rows.count * row_width + keys.count * key_width
    first = np.flatnonzero(np.concatenate(([True], ~(rows.follows() & keys.follows()))))
    size = np.diff(np.append(first, some.size))
    large = size * cost[first] >= ALONE
    for at, batch in zip(first[large].tolist(), size[large].tolist(), strict=True):
        step = max(1, limit // int(cost[at]))
        for i in range(at, at + batch, step):
            n = min(step, at + batch - i)
            yield Chunk(_block(rows, i, n), _block(keys, i, n))
    small = np.flatnonzero(~np.repeat(large, size))
    if small.size:
        yield from _gathered(rows.take(small), keys.take(small), cost[small], limit, device)


def _block(spans: Spans, at: int, batch: int) -> Piece:
    width, start = int(spans.count[at]), int(spans.start[at])
    index = None if spans.index is None else spans.index[start : start + batch * width]
    return Piece(batch, width, start, index)


def _gathered(
    rows: Spans, keys: Spans, cost: Indices, limit: int, device: torch.device
) -> Iterator[Chunk]:
    buckets = [
        np.ceil(np.log2(count) * BUCKETS_AN_OCTAVE).astype(np.int64)
        for count in (rows.count, keys.count)
    ]
    by_size = np.lexsort((*buckets,))
    same = [bucket[by_size[1:]] == bucket[by_size[:-1]] for bucket in buckets]
    ends = np.append(np.flatnonzero(~(same[0] & same[1])) + 1, by_size.size)
    begin = 0
    for end in ends.tolist():
        step = max(1, limit // int(cost[by_size[begin:end]].max()))
        for i in range(begin, end, step):
            which = by_size[i : min(i + step, end)]
            yield Chunk(_gather(rows.take(which), device), _gather(keys.take(which), device))
        begin = end


def _gather(spans: Spans, device: torch.device) -> Piece:
    if spans.count.size == 1:
        return _block(spans, 0, 1)
    width = int(spans.count.max())
    steps = np.arange(width)
    last = spans.count[:, None] - 1
    positions = (spans.start[:, None] + np.minimum(steps, last)).reshape(-1)
    index = torch.from_numpy(positions).to(device)
    if spans.index is not None:
        index = spans.index[index]
    uniform = int(spans.count.min()) == width
    valid = None if uniform else torch.from_numpy(steps <= last).to(device)
    return Piece(spans.count.size, width, 0, index, valid)


def sub_rows(piece: Piece, most: int) -> Iterator[Piece]:
    """The rows of a single segment in runs of at most `most`; several segments stay whole."""
    if piece.batch > 1 or piece.width <= most:
        yield piece
        return
    for at in range(0, piece.width, most):
        end = min(at + most, piece.width)
        positions = None if piece.positions is None else piece.positions[at:end]
        yield Piece(1, end - at, piece.start + at, positions)


def take(x: Tensor, piece: Piece, *, padded: bool) -> Tensor:
    """[batch, width, ...] entries of `x`, a view where they are a block.

    `x` is [entries, ...], or [rows, S, ...] if padded.
    """
    batch, width, start, positions, _ = piece
    if positions is None and padded:
        first = start // x.shape[1]
        return x[first : first + batch, :width]
    if positions is None:
        found = x[start : start + batch * width]
    elif padded:
        row = positions // x.shape[1]
        found = x[row, positions - row * x.shape[1]]
    else:
        found = x.index_select(0, positions)
    return found.view(batch, width, *x.shape[2 if padded else 1 :])


def put(x: Tensor, piece: Piece, value: Tensor, *, padded: bool, add: bool = False) -> None:
    """Writes [batch, width, ...] where `take` reads, or adds it; repetitions are left out."""
    if piece.positions is None:
        target = take(x, piece, padded=padded)
        if add:
            target.add_(value)
        else:
            target.copy_(value)
        return
    flat = x.flatten(0, 1) if padded else x
    index, value = piece.positions, value.flatten(0, 1)
    if piece.valid is not None:
        valid = piece.valid.flatten()
        index, value = index[valid], value[valid]
    if add:
        value = flat.index_select(0, index) + value
    flat.index_copy_(0, index.to(torch.int64), value.to(flat.dtype))
