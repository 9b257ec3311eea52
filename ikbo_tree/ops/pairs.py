"""Segments as rows of matrices, and the loss of all pairs in each: `pairwise_logistic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.kernels.common.library import register

PAIRS = 1 << 18
"""Pairs, or padded rows, that one call of torch looks at: on a CPU they stay in its caches."""
PADDING = 2
"""Segments are cut by their lengths where together they would take more than so many times the
work."""


class Block(NamedTuple):
    """Some segments of like length.

    Attributes:
        segments: [n], which.
        rows: [n, length], their rows; any row where a segment is shorter.
        there: bool [n, length]: false there.
    """

    segments: Tensor
    rows: Tensor
    there: Tensor

    def take(self, x: Tensor, fill: float) -> Tensor:
        """[n, length] of `x` [rows], `fill` where a segment is shorter."""
        return x[self.rows].masked_fill_(~self.there, fill)

    def put(self, out: Tensor, values: Tensor) -> None:
        """Writes values [n, length] where `take` reads."""
        out[self.rows[self.there]] = values[self.there]


def blocks(offsets: Tensor, order: Tensor | None, *, least: int, power: int = 1) -> Iterator[Block]:
    """All segments of at least `least` rows; together those whose lengths waste little work.

    Args:
        offsets: [segments + 1]; on CUDA it waits for them.
        order: rows by segment, or None: 0, 1, 2, ...
        least: rows of the shortest segment that counts.
        power: of a segment's length, that its work grows with.
    """
    starts = offsets.cpu().numpy().astype(np.int64)
    lengths = np.diff(starts)
    known = np.flatnonzero(lengths >= least)
    if known.size == 0:
        return
    longest = int(lengths.max())
    wasted = known.size * longest**power > PADDING * (lengths[known] ** power).sum()
    sizes = np.ceil(np.log2(lengths[known])) if wasted else np.zeros(known.size)
    for size in np.unique(sizes):
        some = known[sizes == size]
        step = max(1, PAIRS // int(lengths[some].max()) ** power)
        for first in range(0, some.size, step):
            which = some[first : first + step]
            yield _block(which, starts[which], lengths[which], order, offsets.device)


def _block(
    which: Any, starts: Any, lengths: Any, order: Tensor | None, device: torch.device
) -> Block:
    steps = np.arange(int(lengths.max()))
    there = steps < lengths[:, None]
    at = np.where(there, starts[:, None] + steps, 0)
    segments, rows, mask = (torch.from_numpy(x).to(device) for x in (which, at, there))
    return Block(segments, rows if order is None else order[rows].to(torch.int64), mask)


class _Sorted(NamedTuple):
    """A block with the rows of each segment by their labels, largest first.

    Attributes:
        block: so sorted.
        labels: [n, length], NaN where there is none.
        winners: so many at the front of each segment may win a pair, none behind them does.
    """

    block: Block
    labels: Tensor
    winners: int

    def anchors(self) -> Iterator[tuple[slice, Tensor]]:
        """Some of the winners at a time, and bool [n, winners, length]: not won over by them."""
        n, length = self.labels.shape
        step = max(1, PAIRS // (n * length))
        for low in range(0, self.winners, step):
            at = slice(low, min(low + step, self.winners))
            wins = self.labels[:, at].unsqueeze(2) > self.labels.unsqueeze(1)
            yield at, wins.logical_not_()


def _sorted_blocks(labels: Tensor, offsets: Tensor, order: Tensor | None) -> Iterator[_Sorted]:
    """Sorted, since a label that few rows have, as a click, makes few pairs of many."""
    for block in blocks(offsets, order, least=2, power=2):
        found = block.take(labels, float("nan"))
        none = found.isnan()
        known = found.masked_fill(none, float("-inf"))
        by_label = torch.sort(known, dim=1, descending=True, stable=True).indices
        least = found.masked_fill(none, float("inf")).amin(1, keepdim=True)
        winners = int((found > least).sum(1).max())
        rows, there = (x.gather(1, by_label) for x in (block.rows, block.there))
        yield _Sorted(Block(block.segments, rows, there), found.gather(1, by_label), winners)


def _forward(
    scores: Tensor, labels: Tensor, offsets: Tensor, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    losses, pairs = torch.zeros_like(scores), torch.zeros_like(scores, dtype=torch.int64)
    for part in _sorted_blocks(labels, offsets, order):
        found = part.block.take(scores, 0.0)
        loss, count = torch.zeros_like(found), torch.zeros_like(part.block.rows)
        for at, not_won in part.anchors():
            gaps = found[:, at].unsqueeze(2) - found.unsqueeze(1)
            terms = torch.nn.functional.logsigmoid(gaps).masked_fill_(not_won, 0)
            loss[:, at] = terms.sum(2).neg_()
            count[:, at] = not_won.shape[2] - not_won.sum(2)
        part.block.put(losses, loss)
        part.block.put(pairs, count)
    return losses, pairs


def _gradient(
    grad: Tensor, scores: Tensor, labels: Tensor, offsets: Tensor, order: Tensor | None
) -> Tensor:
    """Of each row what it wins, less what it loses, summed in the order of the winners."""
    found = torch.zeros_like(scores)
    for part in _sorted_blocks(labels, offsets, order):
        mine, weight = part.block.take(scores, 0.0), part.block.take(grad, 0.0)
        total = torch.zeros_like(mine)
        for at, not_won in part.anchors():
            by = (mine.unsqueeze(1) - mine[:, at].unsqueeze(2)).sigmoid_()
            by.mul_(weight[:, at].unsqueeze(2)).masked_fill_(not_won, 0)
            total += by.sum(1)
            total[:, at] -= by.sum(2)
        part.block.put(found, total)
    return found


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _pairs_gradient(grad, *ctx.saved_tensors), None, None, None


_pairs_gradient = register(
    "pairwise_logistic_backward",
    "(Tensor grad, Tensor scores, Tensor labels, Tensor offsets, Tensor? order) -> Tensor",
    _gradient,
    lambda grad, scores, *rest: torch.empty_like(scores),
)
pairwise_logistic = register(
    "pairwise_logistic",
    "(Tensor scores, Tensor labels, Tensor offsets, Tensor? order) -> (Tensor, Tensor)",
    _forward,
    lambda scores, *rest: (torch.empty_like(scores), torch.empty_like(scores, dtype=torch.int64)),
    setup_context=_setup_context,
    backward=_backward,
)
"""Of each row, the loss of the pairs that it should win, and their number: an op, since how
segments are cut is decided on the host, which a traced program can't look into."""
