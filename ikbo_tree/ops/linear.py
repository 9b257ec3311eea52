"""Linear maps of inputs that live at different levels of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.linear import op as linear_op
from ikbo_tree.kernels.linear_compression import op as linear_compression_op
from ikbo_tree.tree import BroadcastTree

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def linear(
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    tree: BroadcastTree,
    bias: Tensor | None = None,
    level: str | None = None,
    partial_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """`Linear` over the concatenation of all levels' features, which is never built.

    Row i of the result is `sum over l of weights[l] @ inputs[l][a_l(i)] + bias`, where a_l(i) is
    the row of level l above row i: a linear map of a concatenation, split into one product a level
    at the level's own batch size (the decomposition of the published in-kernel broadcast system).

    Args:
        inputs: for each level or table x [rows, K], K its own, any strides.
        weights: for the same names W [N, K]. Their concatenation along K is the flat weight.
        tree: the tree whose rows these are.
        bias: [N].
        level: level of the result, at or below all names; default the finest of them.
        partial_dtype: float16 or bfloat16 rounds what a level hands to the next, which is faster;
            None (or float32) keeps it in float32, so that splitting costs no accuracy.
        impl: `"auto"`, `"reference"`, `"torch"`, `"triton"` or `"gluon"`.

    Returns:
        [rows of the level, N] in the inputs' dtype: float64, float32, float16 or bfloat16, the last
        three summed in float32. Rows beyond the live ones are zero.

    Raises:
        TreeError: names that are no levels, differ between the two or lie on several branches;
            shapes, rows or devices that do not fit.
        TypeError: dtypes that differ or are not of these four.
        UnsupportedError: `impl` cannot run this call.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([[1.0], [10.0]]), "item": torch.tensor([[1.0], [2.0], [3.0]])}
    >>> w = {"user": torch.ones(1, 1), "item": torch.ones(1, 1)}
    >>> linear(x, w, tree=tree).flatten().tolist()
    [2.0, 3.0, 13.0]
    """
    x, weight, *maps = _stages(inputs, weights, tree, level, dims="[rows, K]")
    if bias is not None:
        _check_bias(bias, weight[0])
    _check_partial_dtype(partial_dtype)
    out: Tensor = linear_op.linear(x, weight, bias, *maps, partial_dtype, impl)
    return out


def linear_compression(
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    tree: BroadcastTree,
    level: str | None = None,
    partial_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compresses the stack of all levels' embeddings, which is never built, by a linear map.

    Row i of the result is `sum over l of weights[l] @ inputs[l][a_l(i)]`, where a_l(i) is the row
    of level l above row i: the linear compression embedding (LCE) of the published in-kernel
    broadcast system, for trees of any depth.

    Args:
        inputs: for each level or table E [rows, K, N]: K embeddings (its own number) of width N.
        weights: for the same names W [M, K]. Their concatenation along K is the flat weight.
        tree: the tree whose rows these are.
        level: level of the result, at or below all names; default the finest of them.
        partial_dtype: float16 or bfloat16 rounds what a level hands to the next, which is faster;
            None (or float32) keeps it in float32, so that splitting costs no accuracy.
        impl: `"auto"`, `"reference"`, `"torch"`, `"triton"` or `"gluon"`.

    Returns:
        [rows of the level, M, N] in the inputs' dtype: float64, float32, float16 or bfloat16, the
        last three summed in float32. Rows beyond the live ones are zero.

    Raises:
        TreeError: names that are no levels, differ between the two or lie on several branches;
            shapes, rows or devices that do not fit.
        TypeError: dtypes that differ or are not of these four.
        UnsupportedError: `impl` cannot run this call.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> e = {"user": torch.ones(2, 4, 8), "item": torch.ones(3, 3, 8)}
    >>> w = {"user": torch.ones(5, 4), "item": torch.ones(5, 3)}
    >>> linear_compression(e, w, tree=tree).shape
    torch.Size([3, 5, 8])
    """
    stages = _stages(inputs, weights, tree, level, dims="[rows, K, N]")
    _check_partial_dtype(partial_dtype)
    out: Tensor = linear_compression_op.linear_compression(*stages, partial_dtype, impl)
    return out


def _stages(
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    tree: BroadcastTree,
    level: str | None,
    dims: str,
) -> tuple[list[Tensor], list[Tensor], *tuple[Any, ...]]:
    """The ops' first arguments, x, weight and the fields of `kernels.common.stages.Stages`.

    One stage a name, coarse first; the result's level gets an empty one if it has no input.
    """
    if inputs.keys() != weights.keys():
        raise TreeError("weights", f"must have inputs' names {list(inputs)}", f"{list(weights)}")
    chain = tree.chain("inputs", tuple(inputs), level)
    like, like_weight = next(iter(inputs.values())), next(iter(weights.values()))
    if like.dtype not in _DTYPES:
        raise TypeError(f"inputs must be float64, float32, float16 or bfloat16; got {like.dtype}")
    for name in inputs:
        _check_stage(tree, name, inputs[name], weights[name], like, like_weight, dims)
    last = chain[-1]
    x = [inputs[name] for name in chain if name in inputs]
    weight = [weights[name] for name in chain if name in inputs]
    if last not in inputs:
        x.append(like.new_empty((tree.capacity(last), 0, *like.shape[2:])))
        weight.append(like_weight.new_empty((like_weight.shape[0], 0)))
    consumer, routes = [], []
    for stage, name in enumerate(chain[:-1]):
        # A table's rows go to the level behind it, never to another table.
        at = next(i for i in range(stage + 1, len(chain)) if chain[i] not in tree.tables)
        route = tree.route(chain[at], name)
        assert route is not None
        consumer.append(at)
        routes.append(route)
    live = [tree.live(name) for name in chain]
    return (
        x,
        weight,
        consumer,
        [route.index for route in routes],
        [route.offsets for route in routes],
        [route.order for route in routes],
        [count for count in live if count is not None],
    )


def _check_stage(
    tree: BroadcastTree,
    name: str,
    x: Tensor,
    weight: Tensor,
    like: Tensor,
    like_weight: Tensor,
    dims: str,
) -> None:
    x_name, weight_name = f'inputs["{name}"]', f'weights["{name}"]'
    if x.dim() != dims.count(",") + 1:
        raise TreeError(x_name, f"must be {dims}", _shape(x))
    tree.check(x_name, x, name)
    if x.shape[2:] != like.shape[2:]:
        raise TreeError(x_name, f"must have N = {like.shape[2]} like the first", _shape(x))
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise TreeError(
            weight_name, f"must have K = {x.shape[1]} columns as {x_name}", _shape(weight)
        )
    if weight.shape[0] != like_weight.shape[0]:
        rows = like_weight.shape[0]
        raise TreeError(weight_name, f"must have {rows} rows like the first", _shape(weight))
    _check_like(x_name, x, like)
    _check_like(weight_name, weight, like)


def _check_bias(bias: Tensor, weight: Tensor) -> None:
    if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
        raise TreeError("bias", f"must be [N] with N = {weight.shape[0]}", _shape(bias))
    _check_like("bias", bias, weight)


def _check_like(argument: str, value: Tensor, like: Tensor) -> None:
    if value.dtype != like.dtype:
        raise TypeError(f"{argument} must be {like.dtype} like the first input; got {value.dtype}")
    if value.device != like.device:
        raise TreeError(argument, f"must be on {like.device} like the inputs", str(value.device))


def _check_partial_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"partial_dtype must be None, float32, float16 or bfloat16; got {dtype}")


def _shape(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"
