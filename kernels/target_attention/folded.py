"""How segments become calls of dense attention, decided on the host.

All query rows of a segment are one sequence over its keys. Segments that follow each other with
equal sizes are a view, without a copy: a uniform tree is one chunk. Of the others, large ones go
alone, again without a copy; small ones are gathered together with others of about their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.kernels.target_attention.memories import Memory

Indices = NDArray[np.int64]

VIEW_CALLS = 4
"""So few calls are made one by one, whatever their sizes."""
ALONE = 1 << 16
"""Elements of q, k and v from which a segment gets its own call among many: below, gathering it
into a call with others costs less than another call."""
CALL_FLOPS = 1 << 22
"""What a call costs, in operations of dense attention: about 80 microseconds of one core."""
BUCKETS_AN_OCTAVE = 4
"""Gathered segments differ in rows, and in keys, by at most this fraction of an octave (19 %)."""


class Spans(NamedTuple):
    """Where the query rows, or the keys, of each segment lie: so many entries from its start on.

    Attributes:
        starts: [segments].
        counts: [segments].
        entries: what the entries are, [entries]; None: entry i is position i.
        pitch: distance between the starts of neighbouring segments that makes a block of them a
            view: the padded length, or None where they have to touch.
    """

    starts: Indices
    counts: Indices
    entries: Tensor | None = None
    pitch: int | None = None

    def follows(self) -> NDArray[np.bool_]:
        """[segments - 1]: the next segment has as many entries and lies one pitch further."""
        counts = self.counts[:-1]
        pitch = counts if self.pitch is None else self.pitch
        near = self.starts[:-1] + pitch == self.starts[1:]
        follows: NDArray[np.bool_] = near & (counts == self.counts[1:])
        return follows

    def take(self, which: Indices) -> Spans:
        """The spans of these segments only."""
        return Spans(self.starts[which], self.counts[which], self.entries, self.pitch)


class Limits(NamedTuple):
    """How large a call of several segments may get.

    Attributes:
        row_width: elements of a query row's output.
        key_width: elements of a key and its value.
        rows: most elements of all rows.
        keys: most elements of all keys.
    """

    row_width: int
    key_width: int
    rows: int
    keys: int

    def segments(self, rows: int, keys: int) -> int:
        """Segments of that size to a call, at least one."""
        by_rows = self.rows // max(1, rows * self.row_width)
        return max(1, min(by_rows, self.keys // max(1, keys * self.key_width)))


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
        counts = np.ones(rows, np.int64)
        if live is not None:
            counts[int(live) :] = 0
        return Spans(np.arange(rows), counts)
    offsets = host(memory.offsets)
    return Spans(offsets[:-1], offsets[1:] - offsets[:-1], memory.order)


def key_spans(memory: Memory) -> Spans:
    """The keys of each row of the memory, without the masked ones."""
    k, extent = memory.k, memory.extent
    pitch: int | None = None
    if memory.packed:
        assert extent is not None
        bounds = host(extent).clip(0, k.shape[0])
        starts, counts = bounds[:-1], (bounds[1:] - bounds[:-1]).clip(0)
    else:
        rows, pitch = k.shape[:2]
        starts = np.arange(rows) * pitch
        counts = np.full(rows, pitch) if extent is None else host(extent).clip(0, pitch)
    if memory.mask is None:
        return Spans(starts, counts, None, pitch)
    positions = memory.mask.flatten().nonzero().flatten()
    known = host(positions)
    first = np.searchsorted(known, starts)
    return Spans(first, np.searchsorted(known, starts + counts) - first, positions)


def chunks(rows: Spans, keys: Spans, limits: Limits, device: torch.device) -> Iterator[Chunk]:
    """The work of one memory, segments without rows or without keys left out.

    Args:
        rows: query rows of each segment.
        keys: keys of each segment.
        limits: of a call.
        device: where indices go.
    """
    some = ((rows.counts > 0) & (keys.counts > 0)).nonzero()[0]
    if some.size == 0:
        return
    if some.size < rows.counts.size:
        rows, keys = rows.take(some), keys.take(some)
    breaks = (~(rows.follows() & keys.follows())).nonzero()[0]
    first = np.concatenate(([0], breaks + 1))
    sizes = np.concatenate((first[1:], [some.size])) - first
    if first.size <= VIEW_CALLS:
        large = np.ones(first.size, np.bool_)
    else:
        cost = rows.counts[first] * limits.row_width + keys.counts[first] * limits.key_width
        large = sizes * cost >= ALONE
    for at, size in zip(first[large].tolist(), sizes[large].tolist(), strict=True):
        step = limits.segments(int(rows.counts[at]), int(keys.counts[at]))
        for i in range(at, at + size, step):
            n = min(step, at + size - i)
            yield Chunk(_block(rows, i, n), _block(keys, i, n))
    if not large.all():
        small = (~np.repeat(large, sizes)).nonzero()[0]
        yield from _gathered(rows.take(small), keys.take(small), limits, device)


def _block(spans: Spans, at: int, batch: int) -> Piece:
    width, start = int(spans.counts[at]), int(spans.starts[at])
    entries = None if spans.entries is None else spans.entries[start : start + batch * width]
    return Piece(batch, width, start, entries)


def _gathered(rows: Spans, keys: Spans, limits: Limits, device: torch.device) -> Iterator[Chunk]:
    for group in _groups(rows, keys, limits):
        step = limits.segments(int(rows.counts[group].max()), int(keys.counts[group].max()))
        for i in range(0, group.size, step):
            which = group[i : i + step]
            yield Chunk(_gather(rows.take(which), device), _gather(keys.take(which), device))


def _groups(rows: Spans, keys: Spans, limits: Limits) -> Iterator[Indices]:
    """Segments of about the same size: buckets, joined where a call costs more than padding."""
    buckets = [
        np.ceil(np.log2(counts) * BUCKETS_AN_OCTAVE).astype(np.int64)
        for counts in (rows.counts, keys.counts)
    ]
    by_size = np.lexsort((rows.counts, *buckets))
    same = [bucket[by_size[1:]] == bucket[by_size[:-1]] for bucket in buckets]
    starts = np.append(0, (~(same[0] & same[1])).nonzero()[0] + 1)
    sizes = np.diff(starts, append=by_size.size).tolist()
    most_rows = np.maximum.reduceat(rows.counts[by_size], starts).tolist()
    most_keys = np.maximum.reduceat(keys.counts[by_size], starts).tolist()
    affordable = CALL_FLOPS // max(1, 4 * limits.row_width)
    begin, n, high, wide = 0, 0, 0, 0
    for size, r, k in zip(sizes, most_rows, most_keys, strict=True):
        pairs = (n + size) * max(high, r) * max(wide, k)
        if n and pairs - n * high * wide - size * r * k > affordable:
            yield by_size[begin : begin + n]
            begin, n, high, wide = begin + n, 0, 0, 0
        n, high, wide = n + size, max(high, r), max(wide, k)
    yield by_size[begin:]


def _gather(spans: Spans, device: torch.device) -> Piece:
    if spans.counts.size == 1:
        return _block(spans, 0, 1)
    width = int(spans.counts.max())
    steps = np.arange(width)
    last = spans.counts[:, None] - 1
    positions = (spans.starts[:, None] + np.minimum(steps, last)).reshape(-1)
    index = torch.from_numpy(positions).to(device)
    if spans.entries is not None:
        index = spans.entries[index]
    uniform = int(spans.counts.min()) == width
    valid = None if uniform else torch.from_numpy(steps <= last).to(device)
    return Piece(spans.counts.size, width, 0, index, valid)


def sub_rows(piece: Piece, most: int) -> Iterator[Piece]:
    """The rows of a single segment in runs of at most `most`; several segments stay whole."""
    if piece.batch > 1 or piece.width <= most:
        yield piece
        return
    for at in range(0, piece.width, most):
        end = min(at + most, piece.width)
        positions = None if piece.positions is None else piece.positions[at:end]
        yield Piece(1, end - at, piece.start + at, positions)


def take_rows(x: Tensor, piece: Piece) -> Tensor:
    """[batch, width * n, ...] of `x` [rows, n, ...]; a view where the rows are a block."""
    batch, width, start, positions, _ = piece
    block = slice(start, start + batch * width)
    rows = x[block] if positions is None else x.index_select(0, positions)
    return rows.reshape(batch, width * x.shape[1], *x.shape[2:])


def put_rows(x: Tensor, piece: Piece, value: Tensor, *, add: bool = False) -> None:
    """Writes [batch, width * n, ...] where `take_rows` reads, or adds it; no repetitions."""
    batch, width, start, positions, valid = piece
    if positions is None:
        target = x[start : start + batch * width].view(value.shape)
        if add:
            target.add_(value)
        else:
            target.copy_(value)
        return
    _put(x, positions, valid, value.reshape(batch * width, *x.shape[1:]), add)


def take_keys(x: Tensor, piece: Piece, *, padded: bool) -> Tensor:
    """[batch, width, ...] of `x` [keys, ...], or of a padded [rows, S, ...]; a view of a block."""
    batch, width, start, positions, _ = piece
    if positions is None:
        if padded:
            first = start // x.shape[1]
            return x[first : first + batch, :width]
        found = x[start : start + batch * width]
    elif not padded:
        found = x.index_select(0, positions)
    elif x.stride(0) == x.shape[1] * x.stride(1):
        found = x.flatten(0, 1).index_select(0, positions)
    else:
        row = positions // x.shape[1]
        found = x[row, positions - row * x.shape[1]]
    return found.view(batch, width, *x.shape[2 if padded else 1 :])


def put_keys(x: Tensor, piece: Piece, value: Tensor, *, padded: bool, add: bool = False) -> None:
    """Writes [batch, width, ...] where `take_keys` reads, or adds it; no repetitions."""
    if piece.positions is None:
        target = take_keys(x, piece, padded=padded)
        if add:
            target.add_(value)
        else:
            target.copy_(value)
        return
    flat = x.flatten(0, 1) if padded else x
    _put(flat, piece.positions, piece.valid, value.flatten(0, 1), add)


def _put(x: Tensor, positions: Tensor, valid: Tensor | None, value: Tensor, add: bool) -> None:
    if valid is not None:
        kept = valid.flatten()
        positions, value = positions[kept], value[kept]
    if add:
        value = x.index_select(0, positions) + value
    x.index_copy_(0, positions.to(torch.int64), value.to(x.dtype))
