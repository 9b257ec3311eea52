"""Linear maps and perceptrons over the features of several levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from ikbo_tree.nn.levels import (
    as_cast,
    cast,
    checked_widths,
    described,
    in_order,
    live_rows,
    share,
    split_columns,
    total_width,
)
from ikbo_tree.ops.linear import linear, linear_compression
from ikbo_tree.tree import BroadcastTree


class TreeLinear(nn.Linear):
    """`nn.Linear` over the concatenation of all levels' features, which is never built.

    Parameters are those of the flat `nn.Linear(sum of widths, out_features)`, drawn from the same
    distribution (by the fan-in of the whole concatenation): state dicts load into either.

    Args:
        widths: features of each level or table, in the order of the flat columns.
        out_features: N.
        bias: whether there is one.
        level: level of the result; default the finest of the widths'.
        device: of the parameters.
        dtype: of the parameters.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> layer = TreeLinear({"user": 8, "item": 4}, 16)
    >>> layer({"user": torch.randn(2, 8), "item": torch.randn(3, 4)}, tree=tree).shape
    torch.Size([3, 16])
    >>> layer
    TreeLinear(user=8, item=4, out_features=16, bias=True)
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        out_features: int,
        bias: bool = True,
        *,
        level: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.widths = checked_widths(widths)
        super().__init__(sum(self.widths.values()), out_features, bias, device, dtype)
        self.level = level

    @classmethod
    def from_flat(
        cls, flat: nn.Linear, widths: Mapping[str, int], *, level: str | None = None
    ) -> Self:
        """A module that shares the parameters of a flat one.

        Raises:
            ValueError: the widths do not add up to its `in_features`.
        """
        widths = total_width(widths, flat.in_features, "in_features")
        has_bias = flat.bias is not None
        module = cls(widths, flat.out_features, has_bias, level=level, device="meta")
        share(module, flat)
        return module

    def to_flat(self) -> nn.Linear:
        """The flat module, with the same parameters."""
        has_bias = self.bias is not None
        flat = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        share(flat, self)
        return flat

    def forward(  # type: ignore[override]  # of many levels, not of one tensor
        self, inputs: Mapping[str, Tensor], *, tree: BroadcastTree
    ) -> Tensor:
        """[rows of the level, N] from x [rows, K] of each level."""
        x = {name: cast(part) for name, part in in_order(inputs, self.widths).items()}
        weights = split_columns(cast(self.weight), self.widths)
        bias = None if self.bias is None else cast(self.bias)
        with as_cast(self.weight):
            return linear(x, weights, tree=tree, bias=bias, level=self.level)

    def extra_repr(self) -> str:
        """Widths by level."""
        at = "" if self.level is None else f", level={self.level}"
        has_bias = self.bias is not None
        return f"{described(self.widths)}, out_features={self.out_features}, bias={has_bias}{at}"


class TreeMLP(nn.Sequential):
    """Linear maps with an activation between every two, the first one split by level.

    Parameters are those of the flat `nn.Sequential(nn.Linear, activation, nn.Linear, ...)`, under
    the same names.

    Args:
        widths: features of each level or table, in the order of the flat columns.
        features: widths of the layers' outputs.
        activation: makes what stands between layers; none behind the last.
        level: level of the result; default the finest of the widths'.
        device: of the parameters.
        dtype: of the parameters.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> mlp = TreeMLP({"user": 8, "item": 4}, [16, 1])
    >>> mlp({"user": torch.randn(2, 8), "item": torch.randn(3, 4)}, tree=tree).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        features: Sequence[int],
        activation: Callable[[], nn.Module] = nn.ReLU,
        *,
        level: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not features:
            raise ValueError("features must have at least one width; got none")
        first = TreeLinear(widths, features[0], level=level, device=device, dtype=dtype)
        layers: list[nn.Module] = [first]
        for width, following in pairwise(features):
            layers += [activation(), nn.Linear(width, following, device=device, dtype=dtype)]
        super().__init__(*layers)

    @classmethod
    def from_flat(
        cls, flat: nn.Sequential, widths: Mapping[str, int], *, level: str | None = None
    ) -> Self:
        """A module that shares the parameters and the other layers of a flat one.

        Any module that treats rows alike may stand behind the first, which must be an `nn.Linear`.

        Raises:
            ValueError: it is not, or the widths do not add up to its `in_features`.
        """
        first = next(iter(flat.children()), None)
        if type(first) is not nn.Linear:
            raise ValueError(f"flat must begin with an nn.Linear; got {type(first).__name__}")
        module = cls(widths, [1], level=level, device="meta")
        share(module, flat)
        name = next(iter(flat._modules))
        module._modules[name] = TreeLinear.from_flat(first, widths, level=level)
        return module

    def to_flat(self) -> nn.Sequential:
        """The flat module, with the same parameters and layers."""
        flat = nn.Sequential()
        share(flat, self)
        name, first = next(iter(self._modules.items()))
        assert isinstance(first, TreeLinear)
        flat._modules[name] = first.to_flat()
        return flat

    def forward(  # type: ignore[override]  # of many levels, not of one tensor
        self, inputs: Mapping[str, Tensor], *, tree: BroadcastTree
    ) -> Tensor:
        """[rows of the level, last width] from x [rows, K] of each level."""
        first, *rest = self
        assert isinstance(first, TreeLinear)
        x: Tensor = first(inputs, tree=tree)
        for layer in rest:
            x = layer(x)
        level = tree.chain("inputs", tuple(inputs), first.level)[-1]
        return live_rows(x, tree, level)


class TreeLinearCompression(nn.Module):
    """Compresses the stack of all levels' embeddings by a linear map, without building it.

    The weight [M, sum of fields] is that of the flat `nn.Linear(sum of fields, M, bias=False)`,
    which such a model applies across embeddings: `flat.weight @ stack`.

    Args:
        fields: embeddings of each level or table, in the order of the flat columns.
        out_fields: M.
        level: level of the result; default the finest of the fields'.
        device: of the weight.
        dtype: of the weight.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> compress = TreeLinearCompression({"user": 4, "item": 3}, 2)
    >>> compress({"user": torch.randn(2, 4, 8), "item": torch.randn(3, 3, 8)}, tree=tree).shape
    torch.Size([3, 2, 8])
    """

    def __init__(
        self,
        fields: Mapping[str, int],
        out_fields: int,
        *,
        level: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fields, self.level = checked_widths(fields), level
        # Drawn as the flat one draws its own.
        flat = nn.Linear(sum(fields.values()), out_fields, bias=False, device=device, dtype=dtype)
        self.weight = flat.weight

    @classmethod
    def from_flat(
        cls, flat: nn.Linear, fields: Mapping[str, int], *, level: str | None = None
    ) -> Self:
        """A module that shares the weight of a flat one.

        Raises:
            ValueError: the fields do not add up to its `in_features`, or it has a bias.
        """
        if "bias" in dict(flat.named_parameters()):
            raise ValueError("flat must have no bias")
        fields = total_width(fields, flat.in_features, "in_features")
        module = cls(fields, flat.out_features, level=level, device="meta")
        share(module, flat)
        return module

    def to_flat(self) -> nn.Linear:
        """The flat module, with the same weight."""
        out_fields, total = self.weight.shape
        flat = nn.Linear(total, out_fields, bias=False, device="meta")
        flat.weight = self.weight
        return flat.train(self.training)

    def forward(self, inputs: Mapping[str, Tensor], *, tree: BroadcastTree) -> Tensor:
        """[rows of the level, M, D] from embeddings [rows, fields, D] of each level."""
        x = {name: cast(part) for name, part in in_order(inputs, self.fields).items()}
        weights = split_columns(cast(self.weight), self.fields)
        with as_cast(self.weight):
            return linear_compression(x, weights, tree=tree, level=self.level)

    def extra_repr(self) -> str:
        """Fields by level."""
        at = "" if self.level is None else f", level={self.level}"
        return f"{described(self.fields)}, out_fields={self.weight.shape[0]}{at}"
