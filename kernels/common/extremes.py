"""The largest or smallest value of each segment, elementwise over the trailing dims."""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import Route, live_mask
from ikbo_tree.kernels.common.segments import cut, worth_cutting

_NARROW = 4
"""On a CPU, up to this width torch.segment_reduce (serial, strided) is the faster of the two."""


def segment_extreme(x: Tensor, route: Route, op: str) -> Tensor:
    """The largest (`op="max"`) or smallest (`"min"`) value of each segment; NaN where it has one.

    Args:
        x: [fine, ...], any dtype but bool and complex. Dead rows are never read.
        route: where the rows of the fine level lie.
        op: `"max"` or `"min"`.

    Returns:
        [coarse, ...] in `x`'s dtype. Empty segments and dead rows hold `identity(x.dtype, op)`.
    """
    rows, width = x.shape[0], math.prod(x.shape[1:])
    shape = (route.coarse_rows, *x.shape[1:])
    nothing = identity(x.dtype, op)
    if rows == 0 or width == 0 or route.coarse_rows == 0:
        return x.new_full(shape, nothing)
    flat = x.reshape(rows, width).contiguous()
    if not x.is_floating_point():
        out = _scattered(flat, route, op, nothing)
    elif x.is_cuda or width <= _NARROW:
        out = _walked(flat, route, op, nothing)
    else:
        out = _sparse(flat, route, op, nothing)
    return out.view(shape)


def identity(dtype: torch.dtype, op: str) -> float | int:
    """What the extreme of nothing is: -inf for the largest, the least value of an integer dtype."""
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _walked(x: Tensor, route: Route, op: str, nothing: float | int) -> Tensor:
    if route.order is not None:
        x = torch.index_select(x, 0, route.order)
    offsets = route.offsets
    if worth_cutting(offsets, x.shape[0]):
        starts, offsets = cut(offsets, x.shape[0])
        x = _segment_reduce(x, starts, op, nothing)
    return _segment_reduce(x, offsets, op, nothing)


def _segment_reduce(x: Tensor, offsets: Tensor, op: str, nothing: float | int) -> Tensor:
    # unsafe: no check of the offsets, which would wait for the device.
    return torch.segment_reduce(x, op, offsets=offsets, axis=0, unsafe=True, initial=nothing)


def _sparse(x: Tensor, route: Route, op: str, nothing: float | int) -> Tensor:
    """A product with the segments' incidence matrix whose sums are extremes; parallel over rows."""
    _accept_csr()
    offsets, live = route.offsets, int(route.offsets[-1])
    columns = torch.arange(live, dtype=offsets.dtype) if route.order is None else route.order[:live]
    ones = torch.ones(live, dtype=x.dtype)
    size = (route.coarse_rows, x.shape[0])
    incidence = torch.sparse_csr_tensor(offsets, columns, ones, size, check_invariants=False)
    out: Tensor = torch.sparse.mm(incidence, x, "a" + op)
    empty = (offsets[1:] == offsets[:-1]).unsqueeze(1)
    return out.masked_fill_(empty, nothing)


@functools.cache
def _accept_csr() -> None:
    """Lets torch say, once and to nobody, that its CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero = torch.zeros(1, dtype=torch.int32)
        torch.sparse_csr_tensor(zero, zero[:0], torch.zeros(0), (0, 0), check_invariants=False)


def _scattered(x: Tensor, route: Route, op: str, nothing: float | int) -> Tensor:
    # Of integers, so that the order of atomics can't be seen.
    mask = live_mask(x.shape[0], route.live_fine, x)
    if mask is not None:
        x = x.masked_fill(~mask, nothing)
    index = route.index.to(torch.int64).unsqueeze(1).expand_as(x)
    out = x.new_full((route.coarse_rows, x.shape[1]), nothing)
    return out.scatter_reduce_(0, index, x, "a" + op)
