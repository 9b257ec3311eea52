"""Layer and RMS normalisation of features that live at several levels.

What is normalised is the concatenation of all levels' features, at the rows of the finest, which
is never made: one pass reads each part where it lies and writes the result. The gradient of a
coarse part is summed over its segments from the result's gradient and four numbers a row, so that
it is not held at the finest level either. On a CPU pieces of the concatenation that fit its cache
are made.

The result is the concatenation and not one part a level, because nothing of it is coarse any more:
the mean and the deviation of a row are the finest level's, for the user's features too. So a linear
map of the result is a plain one at the finest level, one GEMM over all columns, and parts would
only have to be put side by side for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.level_norm import torch_impl
from ikbo_tree.kernels.level_norm.op import Concatenation
from ikbo_tree.kernels.level_norm.op import level_norm as _level_norm
from ikbo_tree.ops.checks import check_rows, in_force
from ikbo_tree.ops.crossing import joins, on_host
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.tree import BroadcastTree


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

    The mean is taken away before squares are summed, so that one far larger than the deviation does
    no harm.

    Args:
        inputs: for each level or table x [rows, K_l]. The concatenation has them in the mapping's
            order, K columns in all; so have weight and bias.
        weight: [K], in the inputs' dtype; None: ones.
        bias: [K], likewise; None: zeros.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        eps: added to the variance.
        impl: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the level, K] in the inputs' dtype, computed in float32 (float64 for float64) and
        rounded once. Dead rows are zero. Differentiable once; the inputs, and on a CPU two numbers
        a row, are kept for that.

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
    last = _checked(inputs, weight, bias, tree, level, impl)
    return _normalised(inputs, weight, bias, tree, last, eps, True, impl)


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
        As for `layer_norm`; on a CPU one number a row is kept.

    Raises:
        TreeError: see `layer_norm`.
        TypeError: see `layer_norm`.
        UnsupportedError: see `layer_norm`.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([[1.0], [0.0]]), "item": torch.tensor([[7.0], [1.0], [2.0]])}
    >>> rms_norm(x, tree=tree, eps=0.0)[0]
    tensor([0.2000, 1.4000])
    """
    last = _checked(inputs, weight, None, tree, level, impl)
    return _normalised(inputs, weight, None, tree, last, eps, False, impl)


def _normalised(
    inputs: Mapping[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    tree: BroadcastTree,
    last: str,
    eps: float,
    centred: bool,
    impl: str,
) -> Tensor:
    x = list(inputs.values())
    routes = [tree.route(last, name) for name in inputs]
    maps = [[None if r is None else r[k] for r in routes] for k in range(3)]
    rest = tree.live(last), eps, centred
    if on_host(x[0]) and in_force(impl) in ("auto", "torch"):
        out: Tensor = _OnHost.apply(len(x), *x, weight, bias, *maps[0], *maps[1], *maps[2], *rest)  # type: ignore[no-untyped-call]
    else:
        out = _level_norm(x, weight, bias, *maps, *rest, in_force(impl))
    return out


class _OnHost(torch.autograd.Function):
    """The op's plain torch path, whose statistics are kept for backward.

    Arguments: n, n parts, weight, bias, n indices, n offsets and n orders, live rows, eps, centred.
    """

    @staticmethod
    def forward(ctx: Any, n: int, *arguments: Any) -> Tensor:
        out, statistics = torch_impl.normalised(_concatenation(n, arguments))
        *tensors, ctx.eps, ctx.centred = arguments
        ctx.n = n
        ctx.save_for_backward(*tensors, *statistics)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, rstd, mean = ctx.saved_tensors
        wants = ctx.needs_input_grad[1 : ctx.n + 3]
        call = _concatenation(ctx.n, [*tensors, ctx.eps, ctx.centred])
        found = iter(torch_impl.backward(grad, call, wants, (rstd, mean)))
        grads = [next(found) if want else None for want in wants]
        return None, *grads, *[None] * (3 * ctx.n + 3)


def _concatenation(n: int, arguments: Sequence[Any]) -> Concatenation:
    x, (weight, bias), rest = arguments[:n], arguments[n : n + 2], arguments[n + 2 :]
    index, offsets, order = (rest[k * n : (k + 1) * n] for k in range(3))
    live, eps, centred = rest[3 * n :]
    return Concatenation.of(x, weight, bias, index, offsets, order, live, eps, centred)


def _checked(
    inputs: Mapping[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    tree: BroadcastTree,
    level: str | None,
    impl: str,
) -> str:
    """The level of the result."""
    checked_name(impl)
    steps = joins("inputs", tuple(inputs), tree, level)
    like = next(iter(inputs.values()))
    for name, x in inputs.items():
        check_rows(f'inputs["{name}"]', x, like, tree, name)
        if x.dim() != 2:
            raise TreeError(f'inputs["{name}"]', "must have shape [rows, K]", shape_of(x))
    total = sum(x.shape[1] for x in inputs.values())
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
    return steps[-1][0]
