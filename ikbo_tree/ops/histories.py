"""Pooling of histories on a CPU: owned entries alone are read, and nothing is copied for it.

Which entries those are is looked up on the host, so this is for eager programs; `pooling` has the
same for devices and for traced ones, made of ops on routes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikbo_tree.kernels.common.routes import Route
from ikbo_tree.kernels.common.segments import gather_rows, sum_bags
from ikbo_tree.kernels.reduce.torch_impl import exponentials
from ikbo_tree.ops.crossing import widened

NOTHING = float("-inf")


class Owned:
    """Which entries each row owns.

    Attributes:
        counts: [rows] int64, entries that each row owns.
        total: entries in all.
        size: entries of each row, if padded; None: packed.
        mask: bool [rows, size], if padded; None: they own all.
        start: the first owned one, if packed.
    """

    def __init__(
        self,
        counts: Tensor,
        total: int,
        *,
        size: int | None = None,
        mask: Tensor | None = None,
        start: int = 0,
    ) -> None:
        self.counts, self.total, self.size, self.mask = counts, total, size, mask
        self.start = start

    @classmethod
    def padded(cls, lengths: Tensor | None, rows: int, size: int, live: int) -> Owned:
        """From lengths [rows], or None for `size` each; those of dead rows may be anything."""
        counts = torch.full((rows,), size) if lengths is None else lengths.to(torch.int64)
        if lengths is None and live == rows:
            return cls(counts, rows * size, size=size)
        counts = counts.masked_fill(torch.arange(rows) >= live, 0)
        mask = torch.arange(size) < counts.unsqueeze(1)
        return cls(counts, rows * size, size=size, mask=mask)

    @classmethod
    def packed(cls, offsets: Tensor, total: int, live: int) -> Owned:
        """From offsets [rows + 1]; those behind the live rows' may be anything."""
        counts = offsets.diff().to(torch.int64)
        counts = counts.masked_fill(torch.arange(counts.shape[0]) >= live, 0)
        return cls(counts, total, start=int(offsets[0]) if live else 0)

    @property
    def whole(self) -> bool:
        """Whether they are padded and all owned."""
        return self.size is not None and self.mask is None

    @property
    def packed_entries(self) -> slice:
        """The owned ones, if packed."""
        return slice(self.start, self.start + int(self.bounds[-1]))

    @property
    def rows(self) -> int:
        """Rows, dead ones among them."""
        return self.counts.shape[0]

    @cached_property
    def bounds(self) -> Tensor:
        """[rows + 1] int64: where each row's entries begin among the owned ones."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    @cached_property
    def positions(self) -> Tensor:
        """[owned entries] int64, ascending."""
        if self.mask is not None:
            return self.mask.flatten().nonzero().flatten()
        owned = self.packed_entries
        return torch.arange(owned.start, owned.stop)

    @cached_property
    def row(self) -> Tensor:
        """[total] int64: the row that owns each entry, `rows` if none does."""
        if self.size is not None:
            row = torch.arange(self.rows).unsqueeze(1).expand(self.rows, self.size)
            return (row if self.mask is None else torch.where(self.mask, row, self.rows)).flatten()
        after = self.total - self.start - int(self.bounds[-1])
        nobody = self.counts.new_tensor([self.rows])
        row = torch.cat([nobody, torch.arange(self.rows), nobody])
        ends = self.counts.new_tensor([self.start, after])
        counts = torch.cat([ends[:1], self.counts, ends[1:]])
        return torch.repeat_interleave(row, counts, output_size=self.total)

    def spread(self, x: Tensor) -> Tensor:
        """[total, ...]: its row's value of `x` [rows, ...] for each entry, zero where none owns."""
        return torch.cat([x, x.new_zeros((1, *x.shape[1:]))]).index_select(0, self.row)

    def by_row(self, x: Tensor) -> Tensor:
        """Padded `x` [total, ...] as [rows, size, ...]."""
        assert self.size is not None
        return x.reshape(self.rows, self.size, *x.shape[1:])

    def mask_like(self, x: Tensor) -> Tensor | None:
        """The mask with the rank of `x` [rows, size, ...]."""
        mask = self.mask
        return None if mask is None else mask.view(*mask.shape, *[1] * (x.dim() - 2))


class Sum(torch.autograd.Function):
    """Sums of owned entries, over their number if asked for; differentiable any number of times.

    Arguments: x [total, ...], owned, mean.
    """

    @staticmethod
    def forward(x: Tensor, owned: Owned, mean: bool) -> Tensor:
        """[rows, ...] in the dtype of `x`."""
        flat = widened(x.reshape(x.shape[0], math.prod(x.shape[1:]))).contiguous()
        total = sum_bags(flat, owned.bounds, owned.positions) if flat.numel() else None
        if total is None or owned.rows == 0:
            total = flat.new_zeros((owned.rows, flat.shape[1]))
        return _over(total, owned, mean).to(x.dtype).view(owned.rows, *x.shape[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps which entries they are."""
        x, ctx.owned, ctx.mean = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments."""
        grad = _over(widened(grad), ctx.owned, ctx.mean).to(ctx.dtype)
        return ctx.owned.spread(grad), None, None


def _over(x: Tensor, owned: Owned, mean: bool) -> Tensor:
    """`x` [rows, ...] over the number of owned entries, if a mean is asked for."""
    count = owned.counts.clamp(min=1).to(x.dtype)
    return x / count.view(-1, *[1] * (x.dim() - 1)) if mean else x


class Largest(torch.autograd.Function):
    """The largest of padded entries, owned ones alone; ties share the gradient.

    Arguments: x [rows, size, ...] with size > 0, owned.
    """

    @staticmethod
    def forward(x: Tensor, owned: Owned) -> Tensor:
        """[rows, ...]; -inf where a row owns none."""
        mask = owned.mask_like(x)
        return (x if mask is None else x.masked_fill(~mask, NOTHING)).amax(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the entries and what is largest."""
        x, ctx.owned = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments."""
        x, out = ctx.saved_tensors
        mask = ctx.owned.mask_like(x)
        ties = x == out.unsqueeze(1)
        ties = ties if mask is None else ties.logical_and_(mask)
        # Over no tie at all, where the largest is NaN: the gradient is NaN, as torch.amax gives.
        share = widened(grad) / ties.sum(1)
        dx = ties * share.unsqueeze(1)
        if mask is not None and not bool(share.isfinite().all()):
            dx = dx.masked_fill_(~mask, 0)
        return dx.to(x.dtype), None


class Weighed(torch.autograd.Function):
    """Sums of owned entries weighed by a softmax of scores.

    Arguments: x [total, H, D], scores [total, H], owned.
    """

    @staticmethod
    def forward(x: Tensor, scores: Tensor, owned: Owned) -> tuple[Tensor, Tensor]:
        """The sums [rows, H, D], and the weights [total, H], zero where no row owns."""
        total, heads, dim = x.shape
        p, wide = _weights(widened(scores), owned), widened(x)
        found = wide.new_zeros((owned.rows, heads * dim))
        if x.numel() == 0 or owned.rows == 0:
            pass
        elif owned.whole:
            p_rows, x_rows = owned.by_row(p), owned.by_row(wide)
            if heads == 1:  # without copies, which einsum makes
                found = torch.bmm(p_rows.transpose(1, 2), x_rows.squeeze(2))
            else:
                found = torch.einsum("rsh,rshd->rhd", p_rows, x_rows)
        elif heads == 1:
            flat, at = wide.reshape(total, dim).contiguous(), owned.positions
            weights = p.flatten().index_select(0, at)
            found = torch.embedding_bag(flat, at, owned.bounds, False, 0, False, weights, True)[0]
        else:
            # What no row owns is left out by the sum, whatever it holds.
            flat = (p.unsqueeze(-1) * wide).reshape(total, heads * dim)
            found = sum_bags(flat, owned.bounds, owned.positions)
        return found.view(owned.rows, heads, dim).to(x.dtype), p

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps the entries and their weights."""
        x, scores, ctx.owned = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.scores_dtype = scores.dtype
        ctx.save_for_backward(x, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments."""
        (x, p), owned = ctx.saved_tensors, ctx.owned
        grad, dx, dscores = widened(grad), None, None
        if ctx.needs_input_grad[1]:
            dscores = _score_gradients(grad, widened(x), p, owned).to(ctx.scores_dtype)
        if ctx.needs_input_grad[0]:
            if owned.size is not None and bool(grad.isfinite().all()):
                terms = owned.by_row(p).unsqueeze(-1) * grad.unsqueeze(1)
                dx = terms.reshape(x.shape).to(x.dtype)
            else:
                dx = owned.spread(grad).mul_(p.unsqueeze(-1)).to(x.dtype)
        return dx, dscores, None


def _weights(scores: Tensor, owned: Owned) -> Tensor:
    """[total, H]: softmax over each row's entries; 0 where no row owns or all scores are -inf."""
    if scores.numel() == 0 or owned.rows == 0:
        return scores.new_zeros(scores.shape)
    if owned.size is None:
        inner, p = owned.packed_entries, scores.new_zeros(scores.shape)
        route = Route(owned.row[inner].to(torch.int32), owned.bounds.to(torch.int32))
        _, terms, total = exponentials(scores[inner], route)
        p[inner] = terms.div_(gather_rows(total.masked_fill_(total == 0, 1), route))
        return p
    heads = scores.shape[1]
    # A softmax over the last dim is fused; over another one it is not.
    scores = owned.by_row(scores).squeeze(2) if heads == 1 else owned.by_row(scores)
    mask = owned.mask_like(scores)
    if mask is not None:
        scores = torch.where(mask, scores, NOTHING)
    nothing = scores.amax(1, keepdim=True) == NOTHING
    p = scores.softmax(1).masked_fill_(nothing, 0)
    return (p if mask is None else torch.where(mask, p, 0)).reshape(-1, heads)


def _score_gradients(grad: Tensor, x: Tensor, p: Tensor, owned: Owned) -> Tensor:
    """[total, H]: p times what the gradient says of an entry, less what it says of the mean."""
    if x.numel() == 0 or owned.rows == 0:
        return p.new_zeros(p.shape)
    if owned.size is None:
        inner, found = owned.packed_entries, p.new_zeros(p.shape)
        p, row = p[inner], owned.row[inner]
        dp = (x[inner] * grad.index_select(0, row)).sum(-1)
        mean = sum_bags(p * dp, owned.bounds, None)
        found[inner] = p * (dp - mean.index_select(0, row))
        return found
    x, p = owned.by_row(x), owned.by_row(p)
    if x.shape[2] == 1:
        dp = torch.bmm(grad, x.squeeze(2).transpose(1, 2)).transpose(1, 2)
    else:
        dp = (x * grad.unsqueeze(1)).sum(-1)
    mask = owned.mask_like(p)
    dp = dp if mask is None else torch.where(mask, dp, 0)
    found = p * (dp - (p * dp).sum(1, keepdim=True))
    return (found if mask is None else torch.where(mask, found, 0)).flatten(0, 1)
