"""Cross layers (DCN, DCNv2) over inputs of several levels, the first one split by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.ops.checks import check_rows
from ikbo_tree.ops.crossing import entering, joins, raised, widened
from ikbo_tree.ops.linear import linear
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.tree import BroadcastTree


@dataclass(frozen=True, eq=False)
class VectorCross:
    """`x0 (weight . x) + bias + x` with weight [K] and bias [K]: a layer of DCN."""

    weight: Tensor
    bias: Tensor | None = None

    def first(self) -> Tensor:
        """[N, K]: what multiplies x."""
        return self.weight.unsqueeze(0)

    def then(self, y: Tensor) -> Tensor:
        """What multiplies x0, [rows, K] or [rows, 1], from y = first() @ x [rows, N]."""
        return y


@dataclass(frozen=True, eq=False)
class MatrixCross:
    """`x0 * (weight @ x + bias) + x` with weight [K, K] and bias [K]: a layer of DCNv2."""

    weight: Tensor
    bias: Tensor | None = None

    def first(self) -> Tensor:
        """See `VectorCross`."""
        return self.weight

    def then(self, y: Tensor) -> Tensor:
        """See `VectorCross`."""
        return y if self.bias is None else y + widened(self.bias)


@dataclass(frozen=True, eq=False)
class LowRankCross:
    """`x0 * (u @ (v @ x) + bias) + x` with u [K, r], v [r, K] and bias [K]."""

    u: Tensor
    v: Tensor
    bias: Tensor | None = None

    def first(self) -> Tensor:
        """See `VectorCross`."""
        return self.v

    def then(self, y: Tensor) -> Tensor:
        """See `VectorCross`."""
        return _affine(y, self.u, self.bias)


@dataclass(frozen=True, eq=False)
class MixtureCross:
    """`x0 * (sum over e of p_e u_e @ f(c_e @ f(v_e @ x)) + bias) + x`, p = softmax(gates @ x).

    E experts of rank r: u [E, K, r], v [E, r, K], c [E, r, r], gates [E, K] (None: all weigh the
    same), bias [K]; f is `torch.tanh` unless said otherwise.
    """

    u: Tensor
    v: Tensor
    c: Tensor
    gates: Tensor | None = None
    bias: Tensor | None = None
    activation: Callable[[Tensor], Tensor] = torch.tanh

    def first(self) -> Tensor:
        """See `VectorCross`."""
        v = self.v.flatten(0, 1)
        return v if self.gates is None else torch.cat([v, self.gates])

    def then(self, y: Tensor) -> Tensor:
        """See `VectorCross`."""
        experts, width, rank = self.u.shape
        hidden = self.activation(y[:, : experts * rank].view(-1, experts, rank).transpose(0, 1))
        hidden = self.activation(torch.bmm(hidden, widened(self.c).transpose(1, 2)))
        hidden = hidden.transpose(0, 1)
        if self.gates is None:
            hidden = hidden / experts
        else:
            hidden = hidden * y[:, experts * rank :].softmax(1).unsqueeze(2)
        return _affine(hidden.flatten(1), self.u.transpose(0, 1).reshape(width, -1), self.bias)


CrossLayer: TypeAlias = VectorCross | MatrixCross | LowRankCross | MixtureCross


def cross(
    inputs: Mapping[str, Tensor],
    layers: Sequence[CrossLayer],
    *,
    tree: BroadcastTree,
    level: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """A cross network over the concatenation x0 of all levels' features: DCN, DCNv2 and its kin.

    x starts as x0; every layer adds to it x0 times a function of x. What multiplies x0 first is a
    linear map, split by level (`linear`), so the products of coarse features with their part of
    the weight happen once a coarse row. That holds for the first layer. Its result mixes levels,
    so later layers work at the finest level throughout, as in a flat model. Not so after vectors:
    as long as all layers so far are `VectorCross`, x is still `a * x0 + c`, with a number a for
    each row and one vector c for all rows, so they and the next layer of any form are split, all in
    one call of `linear`.

    Args:
        inputs: for each level or table x [rows, K_l]. x0 has them side by side in the mapping's
            order, K columns in all; so have the weights.
        layers: their weights, in the inputs' dtype; forms may follow each other.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the level, K] in the inputs' dtype; computed in float32 (float64 for float64) and
        rounded once. Dead rows are zero. Differentiable once.

    Raises:
        TreeError: unknown names, names on several branches; shapes, rows or devices that do not
            fit.
        TypeError: dtypes that differ, or no float dtype.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([[1.0], [10.0]]), "item": torch.tensor([[1.0], [2.0], [3.0]])}
    >>> cross(x, [VectorCross(torch.tensor([1.0, 1.0]))], tree=tree).tolist()
    [[3.0, 3.0], [4.0, 8.0], [140.0, 42.0]]
    """
    checked_name(impl)
    last = joins("inputs", tuple(inputs), tree, level)[-1][0]
    like = next(iter(inputs.values()))
    for name, part in inputs.items():
        check_rows(f'inputs["{name}"]', part, like, tree, name)
        if part.dim() != 2:
            raise TreeError(f'inputs["{name}"]', "must have shape [rows, K]", shape_of(part))
    widths = [part.shape[1] for part in inputs.values()]
    for at, layer in enumerate(layers):
        _check_layer(f"layers[{at}]", layer, sum(widths), like)
    wide = {n: entering(widened(x), tree=tree, level=n, to=last) for n, x in inputs.items()}
    parts = [raised(part, tree=tree, level=n, to=last, impl=impl) for n, part in wide.items()]
    x0 = torch.cat(parts, dim=1)
    # Layers that see a x0 + c, and where each one's part of `linear` over x0 begins.
    split = next((at for at, y in enumerate(layers) if type(y) is not VectorCross), len(layers)) + 1
    first = [widened(layer.first()) for layer in layers[:split]]
    x, scale, shift = x0, None, None
    if first:
        weights = dict(zip(wide, torch.cat(first).split(widths, dim=1), strict=True))
        y0 = linear(wide, weights, tree=tree, level=last, impl=impl)
        for layer, weight, y in zip(
            layers[:split], first, y0.split([w.shape[0] for w in first], dim=1), strict=True
        ):
            y = y if scale is None else y * scale
            y = layer.then(y if shift is None else y + weight @ shift)
            scale = y + (1 if scale is None else scale)
            if type(layer) is VectorCross and layer.bias is not None:
                shift = widened(layer.bias) + (0 if shift is None else shift)
        assert scale is not None
        x = x0 * scale
        x = x if shift is None else x + shift
    for layer in layers[split:]:
        x = torch.addcmul(x, x0, layer.then(torch.nn.functional.linear(x, widened(layer.first()))))
        if type(layer) is VectorCross and layer.bias is not None:
            x = x + widened(layer.bias)
    return zero_dead_rows(x.to(like.dtype), tree.live(last))


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, widened(weight), None if bias is None else widened(bias))


def _check_layer(argument: str, layer: CrossLayer, width: int, like: Tensor) -> None:
    weights = {n: x for n, x in vars(layer).items() if isinstance(x, Tensor)}
    shapes: dict[str, tuple[int, ...]] = {"bias": (width,)}
    if isinstance(layer, VectorCross):
        shapes["weight"] = (width,)
    elif isinstance(layer, MatrixCross):
        shapes["weight"] = (width, width)
    elif isinstance(layer, LowRankCross):
        rank = (*layer.v.shape, 0)[0]
        shapes |= {"u": (width, rank), "v": (rank, width)}
    else:
        experts, rank = (*layer.v.shape, 0, 0)[:2]
        shapes |= {"u": (experts, width, rank), "v": (experts, rank, width)}
        shapes |= {"c": (experts, rank, rank), "gates": (experts, width)}
    for name, x in weights.items():
        if x.shape != shapes[name]:
            raise TreeError(f"{argument}.{name}", f"must have shape {shapes[name]}", shape_of(x))
        if x.dtype != like.dtype:
            raise TypeError(f"{argument}.{name} must be {like.dtype}, as inputs; got {x.dtype}")
        if x.device != like.device:
            raise TreeError(f"{argument}.{name}", f"must be on {like.device}", str(x.device))
