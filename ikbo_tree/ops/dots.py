"""Dots of pairs of fields of several levels, forward and backward: what `dot_interaction` runs."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.ops.crossing import on_host, untraced, widened

CHUNK = 1 << 18
"""Elements of products that are held at once on a CPU for each thread: they stay in its cache."""

WALKED = 1 << 15
"""On a CPU, where gathered coarse fields would have so many elements a segment, one GEMM a segment
takes less time (measured at ratios 2 to 64: each costs 6 microseconds that gathering does not)."""


class _Columns(NamedTuple):
    """Which product each column of the results holds, for levels 0 (coarse) ... n - 1.

    The products that level l takes its results from lie side by side in a row: with level 0,
    [F_l, F_0], ..., with itself, [F_l, F_l]; for the last level the other ones' results come first.

    Attributes:
        taken: for each level, the place in that row of each of its results.
        passed: for each level but the last, the last one's columns that are its results.
        used: for each level and each level up to it, the result that each product became. On the
            diagonal that may be any.
    """

    taken: Sequence[Any]
    passed: Sequence[Any]
    used: Sequence[Sequence[Any]]


def _positions(owners: tuple[int, ...], n: int, order: str, itself: bool) -> _Columns:
    """The level of each field in the flat order decides all; as tuples of numbers."""
    size, at = len(owners), np.asarray(owners)
    i, j = (
        np.tril_indices(size, itself - 1) if order == "tril" else np.triu_indices(size, 1 - itself)
    )
    column = np.zeros((size, size), np.int64)
    column[i, j] = column[j, i] = np.arange(len(i))
    finer = np.maximum(at[i], at[j])
    passed = [np.flatnonzero(finer == level) for level in range(n - 1)]
    taken, used = [], []
    for level in range(n):
        mine = passed[level] if level < n - 1 else np.arange(len(i))
        rank = np.zeros(len(i) + 1, np.int64)
        rank[mine] = np.arange(len(mine))
        places = np.zeros(len(mine), np.int64)
        start = 0
        for columns in passed if level == n - 1 else []:
            places[columns] = start + np.arange(len(columns))
            start += len(columns)
        blocks = []
        for other in range(level + 1):
            block = rank[column[np.ix_(at == level, at == other)]]
            kept = np.full(block.shape, True)
            if other == level and not itself:
                np.fill_diagonal(kept, False)
            places[block[kept]] = start + np.flatnonzero(kept)
            start += block.size
            blocks.append(tuple(block.ravel().tolist()))
        taken.append(tuple(places.tolist()))
        used.append(tuple(blocks))
    return _Columns(tuple(taken), tuple(tuple(x.tolist()) for x in passed), tuple(used))


# What torch.compiler.assume_constant_result does, which imports the compiler (and Triton) for it.
_positions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _columns(
    owners: tuple[int, ...], n: int, order: str, itself: bool, device: torch.device
) -> _Columns:
    def tensor(numbers: tuple[int, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    taken, passed, used = _positions(owners, n, order, itself)
    return _Columns(
        [tensor(x) for x in taken],
        [tensor(x) for x in passed],
        [[tensor(x) for x in level] for level in used],
    )


_cached_columns = functools.lru_cache(maxsize=64)(_columns)


class Dots(torch.autograd.Function):
    """Products of pairs of fields of n levels on one path, coarse first; in float32 or float64.

    Arguments: n, the level of each field in the flat order, the order of pairs, whether fields meet
    themselves, impl; then n times fields, n live counts, and the maps of (1, 0), (2, 0), (2, 1) ...
    """

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        """The results of the finest level, coarser ones' among them."""
        call = _Call(*arguments)
        results: list[Tensor] = []
        for level in range(call.n):
            results.append(call.forward(level, results))
        return results[-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the fields and maps alone."""
        ctx.options = inputs[:5]
        ctx.save_for_backward(*inputs[5:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the fields."""
        tensors = ctx.saved_tensors  # once: checkpointing unpacks them no second time
        call = _Call(*ctx.options, *tensors)
        rest = len(tensors) - call.n
        return *[None] * 5, *call.backward(grad), *[None] * rest


class _Call:
    """What both directions need of a call of `Dots`.

    On a CPU rows are taken in pieces, so that products stay in its cache until results are picked
    from them, and a long segment's products with its coarse fields are one GEMM.
    """

    def __init__(
        self, n: int, owners: tuple[int, ...], order: str, itself: bool, impl: str, *rest: Any
    ) -> None:
        self.n, self.itself, self.impl = n, itself, impl
        self.x, self.live, maps = rest[:n], rest[n : 2 * n], rest[2 * n :]
        below = [(level, other) for level in range(n) for other in range(level)]
        self.routes = {pair: Route(*maps[5 * k : 5 * k + 5]) for k, pair in enumerate(below)}
        self.host = on_host(self.x[0])
        columns = _cached_columns if untraced(self.x[0]) else _columns
        self.columns = columns(owners, n, order, itself, self.x[0].device)
        self.wide = [widened(x) for x in self.x]
        # Offsets of segments that are worth a GEMM each.
        self.starts: dict[tuple[int, int], list[int]] = {}
        for pair, route in self.routes.items() if self.host else ():
            gathered = route.fine_rows * math.prod(self.x[pair[1]].shape[1:])
            if route.order is None and gathered >= WALKED * route.coarse_rows:
                self.starts[pair] = route.offsets.tolist()

    def pieces(self, level: int) -> list[slice]:
        """Live rows, cut on a CPU."""
        if not self.host:
            return [slice(None)]
        live = self.live[level]
        rows = self.x[level].shape[0] if live is None else int(live)
        width = sum(block.numel() for block in self.columns.used[level]) + 1
        step = max(1, CHUNK * torch.get_num_threads() // width)
        return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]

    def gather(self, x: Tensor, level: int, other: int, piece: slice) -> Tensor:
        """Rows of `other` above a piece of the level's."""
        route = self.routes[level, other]
        if self.host:
            return x.index_select(0, route.index[piece])
        gathered: Tensor = _broadcast(x, *route, self.impl)
        return gathered

    def runs(self, level: int, other: int, piece: slice) -> Iterator[tuple[int, slice]]:
        """(segment, the vectors in the piece that lie below it)."""
        starts, count = self.starts[level, other], self.x[level].shape[1]
        segment, low = bisect_right(starts, piece.start) - 1, piece.start
        while low < piece.stop:
            high = min(starts[segment + 1], piece.stop)
            if high > low:
                yield segment, slice((low - piece.start) * count, (high - piece.start) * count)
            low = high
            segment += 1

    def forward(self, level: int, above: list[Tensor]) -> Tensor:
        """[rows, results] of one level; the last one's with those of all others."""
        taken, x = self.columns.taken[level], self.wide[level]
        out = x.new_zeros if self.live[level] is not None else x.new_empty
        found = out((x.shape[0], taken.shape[0]))
        for piece in self.pieces(level):
            mine = x[piece]
            parts = [self.cross(mine, level, other, piece) for other in range(level)]
            parts.append(torch.bmm(mine, mine.transpose(1, 2)).flatten(1))
            if level == self.n - 1:
                passed = [self.gather(y, level, other, piece) for other, y in enumerate(above)]
                parts = passed + parts
            products = torch.cat(parts, dim=1)
            if not self.host:
                return products.index_select(1, taken)
            torch.index_select(products, 1, taken, out=found[piece])
        return found

    def cross(self, mine: Tensor, level: int, other: int, piece: slice) -> Tensor:
        """[rows of the piece, F_level F_other]: products with the fields of a level above."""
        theirs = self.wide[other]
        if (level, other) not in self.starts:
            theirs = self.gather(theirs, level, other, piece)
            return torch.bmm(mine, theirs.transpose(1, 2)).flatten(1)
        out = mine.new_empty((mine.shape[0] * mine.shape[1], theirs.shape[1]))
        vectors = mine.flatten(0, 1)
        for segment, at in self.runs(level, other, piece):
            torch.mm(vectors[at], theirs[segment].t(), out=out[at])
        return out.view(mine.shape[0], mine.shape[1] * theirs.shape[1])

    def backward(self, grad: Tensor) -> list[Tensor]:
        """The gradient of each level's fields; dead rows of those are zero on a CPU alone."""
        sums = [x.new_zeros(x.shape) for x in self.wide]
        for level in reversed(range(self.n)):
            part = grad
            if level < self.n - 1:
                route = self.routes[self.n - 1, level]
                part = grad.index_select(1, self.columns.passed[level])
                part = _reduce(part, *route, "sum", self.impl)
            if part.shape[1]:
                self.add_gradients(level, part, sums)
        return [total.to(x.dtype) for total, x in zip(sums, self.x, strict=True)]

    def add_gradients(self, level: int, grad: Tensor, sums: list[Tensor]) -> None:
        """Adds what one level's results give to its fields and to those above."""
        x, used = self.wide[level], self.columns.used[level]
        count, dim = x.shape[1:]
        gathered = {
            other: x.new_zeros((x.shape[0], *self.x[other].shape[1:]))
            for other in range(level)
            if (level, other) not in self.starts
        }
        for piece in self.pieces(level):
            mine, part = x[piece], grad[piece]
            rows = mine.shape[0]
            own = part.index_select(1, used[level]).view(rows, count, count)
            diagonal = own.diagonal(dim1=1, dim2=2)
            diagonal.mul_(2) if self.itself else diagonal.zero_()
            total = torch.bmm(own, mine)
            for other in range(level):
                theirs = self.wide[other]
                back = part.index_select(1, used[other]).view(rows, count, theirs.shape[1])
                if other in gathered:
                    total += torch.bmm(back, self.gather(theirs, level, other, piece))
                    gathered[other][piece] = torch.bmm(back.transpose(1, 2), mine)
                    continue
                vectors, back, into = (
                    mine.flatten(0, 1),
                    back.flatten(0, 1),
                    total.view(rows * count, dim),
                )
                for segment, at in self.runs(level, other, piece):
                    into[at].addmm_(back[at], theirs[segment])
                    sums[other][segment].addmm_(back[at].t(), vectors[at])
            sums[level][piece] += total
        for other, part in gathered.items():
            sums[other] += _reduce(part, *self.routes[level, other], "sum", self.impl)
