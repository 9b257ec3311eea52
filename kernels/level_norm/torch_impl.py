"""The plain PyTorch path of `level_norm`: torch's own norm of the concatenation.

On a CPU a piece of the concatenation is made, used in the cache and forgotten; elsewhere all of it
is made at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.segments import gather_rows, segment_sum
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.level_norm.op import Concatenation

CHUNK = 1 << 19
"""Elements of the result that are worked on at once on a CPU for each thread, in its cache; up to
twice as many are left whole."""

Statistics = tuple[Tensor, Tensor | None]
"""rstd [rows] and, where it is taken away, the mean [rows]; in the accumulator's dtype."""


def forward(call: Concatenation) -> Tensor:
    """[rows, K] in the parts' dtype."""
    return normalised(call)[0]


def normalised(call: Concatenation) -> tuple[Tensor, Statistics]:
    """The result and the statistics of its rows."""
    pieces = _pieces(call)
    if len(pieces) == 1 and pieces[0].stop in (None, call.rows):
        out, rstd, mean = _row_results(call, pieces[0])
        return zero_dead_rows(out, call.live), (rstd, mean)
    like, dtype = call.x[0], accumulator(call.x[0].dtype)
    out = like.new_empty(call.rows, sum(call.widths))
    rstd = like.new_empty(call.rows, dtype=dtype)
    mean = like.new_empty(call.rows, dtype=dtype) if call.centred else None
    for piece in pieces:
        out[piece], rstd[piece], part = _row_results(call, piece)
        if mean is not None and part is not None:
            mean[piece] = part
    dead = slice(pieces[-1].stop, None)
    for whole in (out, rstd, mean):
        if whole is not None:
            whole[dead] = 0
    return out, (rstd, mean)


def backward(
    grad: Tensor, call: Concatenation, wants: Sequence[bool], statistics: Statistics | None = None
) -> list[Tensor]:
    """The wanted gradients of each x, the weight and the bias; without `statistics`, finds them."""
    dtype, widths = accumulator(grad.dtype), call.widths
    pieces, n = _pieces(call), len(widths)
    sums = [grad.new_zeros(sum(widths), dtype=dtype) if want else None for want in wants[n:]]
    fine = [
        grad.new_empty((call.rows, width), dtype=grad.dtype if call.routes[at] is None else dtype)
        for at, width in enumerate(widths)
    ]
    for piece in pieces:
        dx, *columns = _row_gradients(grad[piece], call, piece, wants[n:], statistics)
        for whole, part in zip(fine, dx.split(widths, dim=1), strict=True):
            whole[piece] = part
        for total, column in zip(sums, columns, strict=True):
            if total is not None and column is not None:
                total += column
    stop = pieces[-1].stop
    found = []
    for dx, route, want in zip(fine, call.routes, wants[:n], strict=True):
        if stop is not None:
            dx[stop:] = 0
        if want:
            found.append(dx if route is None else segment_sum(dx, route).to(grad.dtype))
    return [*found, *(total.to(grad.dtype) for total in sums if total is not None)]


def _pieces(call: Concatenation) -> list[slice]:
    """All rows; on a CPU the live ones, cut."""
    if call.x[0].device.type != "cpu":
        return [slice(None)]
    rows = call.rows if call.live is None else int(call.live)
    step = max(1, CHUNK * torch.get_num_threads() // max(1, sum(call.widths)))
    if rows <= 2 * step:
        return [slice(0, rows)]
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def _joined(call: Concatenation, piece: slice) -> Tensor:
    """[rows of the piece, K]: all parts side by side, wide."""
    parts, host = [], call.x[0].device.type == "cpu"
    for part, route in zip(call.x, call.routes, strict=True):
        if route is None:
            part = part[piece] if host else zero_dead_rows(part, call.live)
        elif host and part.shape[0]:
            part = part.index_select(0, route.index[piece])
        else:
            part = gather_rows(part, route)[piece]
        parts.append(part.to(accumulator(part.dtype)))
    return torch.cat(parts, dim=1)


def _row_results(call: Concatenation, piece: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result, rstd and mean of a piece."""
    x, dtype = _joined(call, piece), call.x[0].dtype
    weight, bias = (None if w is None else w.to(x.dtype) for w in (call.weight, call.bias))
    if call.centred:
        x, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], weight, bias, call.eps)
        return x.to(dtype), rstd.squeeze(1), mean.squeeze(1)
    rstd = _rms_rstd(x, call.eps)
    x = x.mul_(rstd.unsqueeze(1))
    return (x if weight is None else x.mul_(weight)).to(dtype), rstd, None


def _rms_rstd(x: Tensor, eps: float) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(x, dim=1).square_()
    return size.div_(x.shape[1]).add_(eps).rsqrt_()


def _row_gradients(
    grad: Tensor,
    call: Concatenation,
    piece: slice,
    wants: Sequence[bool],
    statistics: Statistics | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of a piece: the gradient of all parts side by side, of the weight and of the bias."""
    x = _joined(call, piece)
    grad = grad.to(x.dtype)
    weight = None if call.weight is None else call.weight.to(x.dtype)
    if call.x[0].device.type != "cpu":
        grad = zero_dead_rows(grad, call.live)
    if statistics is None:
        rstd, mean = _statistics(x, call)
    else:
        rstd, mean = statistics[0][piece], statistics[1]
        mean = None if mean is None else mean[piece]
    rstd = rstd.unsqueeze(1)
    if mean is not None:
        # Torch's kernel has a bias's gradient only where there is a bias.
        ones = torch.ones_like(x[0]) if wants[0] and weight is None else weight
        bias = x.new_empty(x.shape[1]) if wants[1] else None
        found: tuple[Tensor, Tensor | None, Tensor | None]
        found = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[1:], mean.unsqueeze(1), rstd, ones, bias, [True, *wants]
        )
        return found
    x *= rstd
    d_weight = (grad * x).sum(0) if wants[0] else None
    d_bias = grad.sum(0) if wants[1] else None
    grad = grad if weight is None else grad * weight
    inner = (grad * x).sum(1, keepdim=True) / x.shape[1]
    return torch.addcmul(grad, x, inner, value=-1).mul_(rstd), d_weight, d_bias


def _statistics(x: Tensor, call: Concatenation) -> Statistics:
    """Of the rows of a piece [rows, K]."""
    if not call.centred:
        rstd, mean = _rms_rstd(x, call.eps), None
    else:
        _, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], None, None, call.eps)
        rstd, mean = rstd.squeeze(1), mean.squeeze(1)
    if x.device.type != "cpu":
        # Without an eps that of dead rows is infinite.
        rstd = zero_dead_rows(rstd, call.live)
    return rstd, mean
