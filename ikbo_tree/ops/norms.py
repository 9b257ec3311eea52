"""Layer and RMS normalisation of features that live at several levels.

What is normalised is the concatenation of all levels' features, at the rows of the finest. Its
statistics come from each level's own, taken once a row and merged on the way down: two numbers a
row travel, not its features. Not so on a CPU, where a piece of the concatenation fits its cache and
another pass over it costs less than calls of torch for each level.

The result is the concatenation and not one part a level, because nothing of it is coarse any more:
the mean and the deviation of a row are the finest level's, for the user's features too. So a linear
map of the result is a plain one at the finest level, one GEMM over all columns, and parts would
only have to be put side by side for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import Route, zero_dead_rows
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.ops.checks import check_plain, check_rows, in_force
from ikbo_tree.ops.crossing import entering, joins, on_host, raised, widened
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.tree import BroadcastTree

CHUNK = 1 << 19
"""Elements of the result that are worked on at once on a CPU for each thread, in its cache; up to
twice as many are left whole."""


def layer_norm(
    inputs: Mapping[str, Tensor],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    tree: BroadcastTree,
    level: str | None = None,
    eps: float = 1e-5,
    impl: str = "auto",
) -> Tensor:
    """`LayerNorm` over the concatenation of all levels' features.

    Means and sums of squared deviations of the levels are merged pairwise (Chan, Golub, LeVeque),
    never as a difference of squares, so that a mean far larger than the deviation does no harm. (On
    a CPU the statistics are those of torch's own kernel, piece by piece.)

    Args:
        inputs: for each level or table x [rows, K_l]. The concatenation has them in the mapping's
            order, K columns in all; so have weight and bias.
        weight: [K], in the inputs' dtype; None: ones.
        bias: [K], likewise; None: zeros.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        eps: added to the variance.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the level, K] in the inputs' dtype, computed in float32 (float64 for float64) and
        rounded once. Dead rows are zero. Differentiable once; the inputs and two numbers a row are
        kept for that.

    Raises:
        TreeError: unknown names, names on several branches, no features at all; shapes, rows or
            devices that do not fit.
        TypeError: dtypes that differ, or no float dtype.
        UnsupportedError: `impl` cannot run this call.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([[1.0], [0.0]]), "item": torch.tensor([[3.0], [5.0], [-8.0]])}
    >>> layer_norm(x, tree=tree, eps=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]
    """
    widths, steps = _checked(inputs, weight, bias, tree, level, impl)
    last = steps[-1][0]
    parts = {n: entering(x, tree=tree, level=n, to=last) for n, x in inputs.items()}
    options = _Options(len(parts), in_force(impl), eps, centred=True)
    if on_host(next(iter(parts.values()))):
        return _normalised(parts, None, None, weight, bias, tree, last, options)
    with torch.no_grad():
        found: dict[str, tuple[int, Tensor]] = {}
        for name, producers in steps:
            groups = []
            if widths.get(name):
                mean = widened(parts[name]).mean(1)
                square = (parts[name] - mean.unsqueeze(1)).square_().sum(1)
                groups.append((widths[name], torch.stack([mean, square], dim=1)))
            for producer in producers:
                if producer in found:
                    count, above = found[producer]
                    above = raised(above, tree=tree, level=producer, to=name, impl=impl)
                    groups.append((count, above))
            if groups:
                found[name] = _merged(groups)
        total, statistics = found[last]
        mean, square = statistics.unbind(1)
        rstd = torch.rsqrt(square / total + eps)
    return _normalised(parts, mean.contiguous(), rstd, weight, bias, tree, last, options)


def rms_norm(
    inputs: Mapping[str, Tensor],
    weight: Tensor | None = None,
    *,
    tree: BroadcastTree,
    level: str | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> Tensor:
    """`RMSNorm` over the concatenation of all levels' features.

    Args:
        inputs: see `layer_norm`.
        weight: [K], in the inputs' dtype; None: ones.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        eps: added to the mean of squares.
        impl: see `layer_norm`.

    Returns:
        As for `layer_norm`; one number a row is kept.

    Raises:
        TreeError: see `layer_norm`.
        TypeError: see `layer_norm`.
        UnsupportedError: see `layer_norm`.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([[1.0], [0.0]]), "item": torch.tensor([[7.0], [1.0], [2.0]])}
    >>> rms_norm(x, tree=tree, eps=0.0)[0]
    tensor([0.2000, 1.4000])
    """
    widths, steps = _checked(inputs, weight, None, tree, level, impl)
    last = steps[-1][0]
    parts = {n: entering(x, tree=tree, level=n, to=last) for n, x in inputs.items()}
    options = _Options(len(parts), in_force(impl), eps, centred=False)
    if on_host(next(iter(parts.values()))):
        return _normalised(parts, None, None, weight, None, tree, last, options)
    with torch.no_grad():
        found: dict[str, Tensor] = {}
        for name, producers in steps:
            squares = [widened(parts[name]).square().sum(1)] if name in parts else []
            for producer in producers:
                above = found[producer]
                squares.append(raised(above, tree=tree, level=producer, to=name, impl=impl))
            found[name] = torch.stack(squares).sum(0)
        rstd = torch.rsqrt(found[last] / sum(widths.values()) + eps)
    return _normalised(parts, None, rstd, weight, None, tree, last, options)


def _merged(parts: list[tuple[int, Tensor]]) -> tuple[int, Tensor]:
    """Statistics over all columns from those of groups: how many, [rows, (mean, sum of squares)].

    Squares are of deviations from the group's own mean.
    """
    count, total = parts[0]
    for more, part in parts[1:]:
        mean, square = total.unbind(1)
        shift, other = part[:, 0] - mean, part[:, 1]
        share = more / (count + more)
        mean, square = mean + shift * share, square + other + shift.square() * (count * share)
        count, total = count + more, torch.stack([mean, square], dim=1)
    return count, total


class _Options(NamedTuple):
    """What is the same for all rows.

    Attributes:
        n: number of parts.
        impl: of the tree ops inside.
        eps: added to the variance or mean of squares.
        centred: whether the mean is taken away.
    """

    n: int
    impl: str
    eps: float
    centred: bool


def _normalised(
    parts: Mapping[str, Tensor],
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    tree: BroadcastTree,
    last: str,
    options: _Options,
) -> Tensor:
    maps: list[Tensor | None] = []
    for name in parts:
        route = tree.route(last, name)
        maps += [None] * 5 if route is None else [*route]
    live = tree.live(last)
    if rstd is not None:
        # Without an eps that of dead rows is infinite.
        rstd = zero_dead_rows(rstd, live)
    out: Tensor | tuple[Tensor, ...] = _Normalised.apply(  # type: ignore[no-untyped-call]
        options, live, mean, rstd, weight, bias, *parts.values(), *maps
    )
    return zero_dead_rows(out[0] if isinstance(out, tuple) else out, live)


class _Normalised(torch.autograd.Function):
    """`(x - mean) * rstd * weight + bias` of n parts side by side.

    Arguments: options, live rows (or None), mean [rows] (or None), rstd [rows], weight, bias (or
    None), n parts, and n times the maps from the result's rows to the part's (or None). Gradients
    are the parts' in all, through mean and rstd too. On a CPU rstd is None: the statistics are
    found here, and come back behind the result.
    """

    @staticmethod
    def forward(options: _Options, live: Tensor | None, *tensors: Any) -> Any:
        call = _Call(options, tensors)
        if tensors[1] is None:
            return call.normalise(live)
        part = call.joined(slice(None))
        part = part if call.mean is None else part.sub_(call.mean.unsqueeze(1))
        part = part.mul_(call.rstd.unsqueeze(1))
        part = part if call.weight is None else part.mul_(call.weight)
        part = part if call.bias is None else part.add_(call.bias)
        return part.to(call.parts[0].dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options, _, *tensors = inputs
        if isinstance(output, tuple):
            _, tensors[1], *mean = output
            tensors[0] = mean[0] if mean else None
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = _Call(ctx.options, ctx.saved_tensors).backward(grad)
        return *[None] * 4, *found, *[None] * (5 * ctx.options.n)


class _Call:
    """What both directions need of a call of `_Normalised`."""

    def __init__(self, options: _Options, tensors: Sequence[Any]) -> None:
        n = options.n
        self.mean, self.rstd, self.weight, self.bias = tensors[:4]
        self.parts, maps, self.options = tensors[4 : 4 + n], tensors[4 + n :], options
        self.widths = [part.shape[1] for part in self.parts]
        self.routes = [
            None if maps[5 * k] is None else Route(*maps[5 * k : 5 * k + 5]) for k in range(n)
        ]
        whole = next((i for i, route in enumerate(self.routes) if route is None), 0)
        route = self.routes[whole]
        self.rows = self.parts[whole].shape[0] if route is None else route.fine_rows
        self.host = on_host(self.parts[0])

    def pieces(self) -> list[slice]:
        """All rows, cut on a CPU."""
        if not self.host:
            return [slice(None)]
        step = max(1, CHUNK * torch.get_num_threads() // sum(self.widths))
        if self.rows <= 2 * step:
            return [slice(None)]
        return [slice(at, at + step) for at in range(0, self.rows, step)]

    def normalise(self, live: Tensor | None) -> tuple[Tensor, ...]:
        """The result, rstd [rows] and, if it is taken away, the mean."""
        pieces = self.pieces()
        if len(pieces) == 1:
            out, rstd, *mean = self.row_results(pieces[0])
            return out, zero_dead_rows(rstd, live), *mean
        like, dtype = self.parts[0], widened(self.parts[0][:0]).dtype
        shape = self.rows, sum(self.widths)
        whole = [like.new_empty(shape), *(like.new_empty(self.rows, dtype=dtype) for _ in range(2))]
        for piece in pieces:
            for x, part in zip(whole, self.row_results(piece), strict=False):
                x[piece] = part
        out, rstd, mean = whole
        return (out, zero_dead_rows(rstd, live), mean)[: 2 + self.options.centred]

    def row_results(self, piece: slice) -> tuple[Tensor, ...]:
        """The same of a piece."""
        x, (weight, bias) = self.joined(piece), map(_wide, (self.weight, self.bias))
        dtype, width, eps = self.parts[0].dtype, x.shape[1], self.options.eps
        if self.options.centred:
            x, mean, rstd = torch.native_layer_norm(x, [width], weight, bias, eps)
            return x.to(dtype), rstd.squeeze(1), mean.squeeze(1)
        rstd = torch.linalg.vector_norm(x, dim=1).square_().div_(width).add_(eps).rsqrt_()
        x = x.mul_(rstd.unsqueeze(1))
        return (x if weight is None else x.mul_(weight)).to(dtype), rstd

    def joined(self, piece: slice) -> Tensor:
        """[rows of the piece, K]: all parts side by side."""
        parts = []
        for part, route in zip(self.parts, self.routes, strict=True):
            if route is None:
                part = part[piece]
            elif self.host and part.shape[0]:
                part = part.index_select(0, route.index[piece])
            else:
                part = _broadcast(part, *route, self.options.impl)[piece]
            parts.append(widened(part))
        return torch.cat(parts, dim=1)

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of weight, bias and the parts."""
        d_weight, d_bias = (self.rstd.new_zeros(sum(self.widths)) for _ in range(2))
        fine = [self.rstd.new_empty((self.rstd.shape[0], width)) for width in self.widths]
        for piece in self.pieces():
            dx, dw, db = self.row_gradients(widened(grad[piece]), piece)
            if dw is not None:
                d_weight += dw
            if db is not None:
                d_bias += db
            for whole, part in zip(fine, dx.split(self.widths, dim=1), strict=True):
                whole[piece] = part
        for at, route in enumerate(self.routes):
            if route is not None:
                fine[at] = _reduce(fine[at], *route, "sum", self.options.impl)
        return [
            None if self.weight is None else d_weight.to(self.weight.dtype),
            None if self.bias is None else d_bias.to(self.bias.dtype),
            *(x.to(part.dtype) for x, part in zip(fine, self.parts, strict=True)),
        ]

    def row_gradients(
        self, grad: Tensor, piece: slice
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of a piece: the gradient of all parts side by side, of the weight and of the bias."""
        x, rstd = self.joined(piece), self.rstd[piece].unsqueeze(1)
        weight = _wide(self.weight)
        if self.mean is not None:
            bias, mean = _wide(self.bias), self.mean[piece].unsqueeze(1)
            wants = [True, weight is not None, bias is not None]
            found: tuple[Tensor, Tensor | None, Tensor | None]
            found = torch.ops.aten.native_layer_norm_backward(
                grad, x, x.shape[1:], mean, rstd, weight, bias, wants
            )
            return found
        x *= rstd
        d_weight = None if weight is None else (grad * x).sum(0)
        grad = grad if weight is None else grad * weight
        inner = (grad * x).sum(1, keepdim=True) / x.shape[1]
        return torch.addcmul(grad, x, inner, value=-1).mul_(rstd), d_weight, None


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else widened(x)


def _checked(
    inputs: Mapping[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    tree: BroadcastTree,
    level: str | None,
    impl: str,
) -> tuple[dict[str, int], list[tuple[str, list[str]]]]:
    """The width of each input, and how statistics travel down."""
    checked_name(impl)
    steps = joins("inputs", tuple(inputs), tree, level)
    like = next(iter(inputs.values()))
    if on_host(like):
        check_plain(impl, "a norm over levels")
    for name, x in inputs.items():
        check_rows(f'inputs["{name}"]', x, like, tree, name)
        if x.dim() != 2:
            raise TreeError(f'inputs["{name}"]', "must have shape [rows, K]", shape_of(x))
    widths = {name: x.shape[1] for name, x in inputs.items()}
    total = sum(widths.values())
    if total == 0:
        raise TreeError("inputs", "must have at least one feature", "none")
    for argument, given in (("weight", weight), ("bias", bias)):
        if given is None:
            continue
        if given.shape != (total,):
            raise TreeError(argument, f"must have shape [{total}]", shape_of(given))
        if given.dtype != like.dtype:
            raise TypeError(f"{argument} must be {like.dtype} like the inputs; got {given.dtype}")
        if given.device != like.device:
            raise TreeError(argument, f"must be on {like.device}", str(given.device))
    return widths, steps
