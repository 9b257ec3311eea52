"""How operands of a composed op meet: widened, carried down a route, combined on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.broadcast.op import broadcast as _broadcast
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.kernels.modulate.op import modulate as _modulate
from ikbo_tree.kernels.reduce.op import reduce as _reduce
from ikbo_tree.ops import segments
from ikbo_tree.ops.checks import in_force
from ikbo_tree.tree import BroadcastTree


def on_host(x: Tensor) -> bool:
    """Whether work may be cut up by what maps hold: no device to wait for, and nothing traced."""
    return x.device.type == "cpu" and untraced(x)


def untraced(x: Tensor) -> bool:
    """Whether `x` is a real tensor in an eager program."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


def widened(x: Tensor) -> Tensor:
    """`x` in the dtype that ops calculate in: float64 as it is, all else as float32."""
    return x.to(accumulator(x.dtype))


def joins(
    argument: str, names: Sequence[str], tree: BroadcastTree, level: str | None
) -> list[tuple[str, list[str]]]:
    """How partial results travel down: for each name, coarse first, who hands its own to it.

    A level hands to the next finer one named, a table to the level behind it (`TreeMaps.chain`).

    Raises:
        TreeError: an unknown name, no name at all, or levels on different branches.
    """
    chain = tree.chain(argument, names, level)
    producers: dict[str, list[str]] = {name: [] for name in chain}
    for at, name in enumerate(chain[:-1]):
        producers[next(n for n in chain[at + 1 :] if n not in tree.tables)].append(name)
    return list(producers.items())


def entering(x: Tensor, *, tree: BroadcastTree, level: str, to: str) -> Tensor:
    """`x` with zeros in the rows that no row of `to` depends on: dead and childless ones.

    A gradient of 0 times what such a row holds, or what it meets there, could be NaN (contracts 3,
    5 and 9); the gradient of this selection is 0 instead.
    """
    route = None if level == to else tree.route(to, level)
    if route is None:
        return zero_dead_rows(x, tree.live(level))
    used = (route.offsets.diff() > 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(used, x, x.new_zeros(()))


def raised(x: Tensor, *, tree: BroadcastTree, level: str, to: str, impl: str) -> Tensor:
    """`broadcast`, but `x` itself where it lies at `to` already."""
    if level == to:
        return x
    return segments.broadcast(x, tree=tree, level=level, to=to, impl=impl)


def modulated(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    tree: BroadcastTree,
    level: str,
    of: str,
    dtype: torch.dtype,
    impl: str,
) -> Tensor:
    """`x * broadcast(scale) + broadcast(shift)`, of which nothing is kept but `x` and `scale`.

    Args:
        x: [rows of `level`, ...].
        scale: [rows of `of`, ...], of as many dims; None: 1.
        shift: likewise, in the dtype of `scale`; None: 0.
        tree: the tree.
        level: the finer level.
        of: a level above it, or a table reached from it; not `level` itself.
        dtype: of the result.
        impl: of the tree ops inside.

    Returns:
        [rows of `level`, ...], computed in float32 (float64 for float64), rounded once. Dead rows
        are zero.
    """
    route = tree.route(level, of)
    assert route is not None
    if all(y is None or y.shape[1:] == x.shape[1:] for y in (scale, shift)):
        out: Tensor = _modulate(x, scale, shift, *route, dtype, in_force(impl))
        return out
    # Wide, or gradients would be rounded before autograd sums them over trailing dims.
    x = widened(x)
    if scale is not None:
        x = _Scaled.apply(x, widened(scale), *route, in_force(impl))  # type: ignore[no-untyped-call]
    if shift is not None:
        x = added(raised(widened(shift), tree=tree, level=of, to=level, impl=impl), x)
    return zero_dead_rows(x.to(dtype), tree.live(level))


class _Scaled(torch.autograd.Function):
    """`fine * broadcast(coarse)`, whose trailing dims broadcast in either.

    Its own backward, since autograd's would keep the gathered copy of `coarse`.
    """

    @staticmethod
    def forward(fine: Tensor, coarse: Tensor, *rest: Any) -> Tensor:
        return _product(fine, _broadcast(coarse, *rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.impl = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fine, coarse, *maps = ctx.saved_tensors
        grad = widened(grad)
        d_fine = d_coarse = None
        if ctx.needs_input_grad[0]:
            product = grad * _broadcast(coarse, *maps, ctx.impl)
            d_fine = _summed_like(product, fine).to(fine.dtype)
        if ctx.needs_input_grad[1]:
            product = _summed_like(grad * fine, coarse)
            d_coarse = _reduce(product, *maps, "sum", ctx.impl).to(coarse.dtype)
        return d_fine, d_coarse, *[None] * 6


def _product(fine: Tensor, gathered: Tensor) -> Tensor:
    return gathered.mul_(fine) if _fits(gathered, fine) else gathered * fine


def added(fresh: Tensor, x: Tensor) -> Tensor:
    """Their sum, in the memory of `fresh`, which no one else holds, where that can be."""
    return fresh.add_(x) if _fits(fresh, x) else fresh + x


def _fits(fresh: Tensor, x: Tensor) -> bool:
    """Whether the memory of `fresh` can take an elementwise result of the two.

    Autograd allows no writing to what an op's body made as a view.
    """
    if torch.is_grad_enabled() and (fresh.requires_grad or x.requires_grad):
        return False
    shape = torch.broadcast_shapes(fresh.shape, x.shape)
    return fresh.shape == shape and fresh.dtype == torch.promote_types(fresh.dtype, x.dtype)


def _summed_like(x: Tensor, like: Tensor) -> Tensor:
    """Summed over the trailing dims in which `like` was broadcast; rows stay."""
    dims = [d for d in range(1, x.dim()) if like.shape[d] != x.shape[d]]
    return x.sum(dims, keepdim=True) if dims else x
