"""Interactions between the features of several levels: cross networks, dots of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from ikbo_tree.nn.levels import (
    as_cast,
    cast,
    checked_widths,
    described,
    in_order,
    share,
    total_width,
)
from ikbo_tree.ops.cross_layers import CrossLayer, LowRankCross, MatrixCross, cross
from ikbo_tree.ops.interactions import ORDERS, dot_interaction
from ikbo_tree.tree import BroadcastTree


class TreeCrossNet(nn.ModuleList):
    """The cross network of DCNv2: `x <- x0 * (W x + b) + x` over all levels' features x0.

    Its modules are those of a flat model's `nn.ModuleList`: `nn.Linear(K, K)` a layer, K the sum of
    widths; with a rank `nn.Sequential(nn.Linear(K, rank, bias=False), nn.Linear(rank, K))`.

    Args:
        widths: features of each level or table, in the order of the flat columns.
        layers: how many.
        rank: of the matrices W; None: they are full.
        level: level of the result; default the finest of the widths'.
        device: of the parameters.
        dtype: of the parameters.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> net = TreeCrossNet({"user": 8, "item": 4}, layers=2)
    >>> net({"user": torch.randn(2, 8), "item": torch.randn(3, 4)}, tree=tree).shape
    torch.Size([3, 12])
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        layers: int,
        *,
        rank: int | None = None,
        level: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.widths, self.level = checked_widths(widths), level
        total = sum(widths.values())

        def map_of(columns: int, rows: int, bias: bool = True) -> nn.Linear:
            return nn.Linear(columns, rows, bias, device, dtype)

        super().__init__(
            map_of(total, total)
            if rank is None
            else nn.Sequential(map_of(total, rank, bias=False), map_of(rank, total))
            for _ in range(layers)
        )

    @classmethod
    def from_flat(
        cls, flat: nn.ModuleList, widths: Mapping[str, int], *, level: str | None = None
    ) -> Self:
        """A module that shares the layers of a flat one.

        Raises:
            ValueError: a layer of another form, or widths that do not add up to its columns.
        """
        for at, layer in enumerate(flat):
            parts = list(layer) if isinstance(layer, nn.Sequential) else [layer]
            maps = [x for x in parts if isinstance(x, nn.Linear)]
            fits = len(maps) == len(parts) in (1, 2)
            if not fits or (len(maps) == 2 and maps[0].bias is not None):
                rule = "an nn.Linear, or an nn.Sequential of two, the first without bias"
                raise ValueError(f"flat[{at}] must be {rule}; got {layer}")
            total_width(widths, maps[0].in_features, "in_features")
            total_width(widths, maps[-1].out_features, "out_features")
        module = cls(widths, 0, level=level)
        share(module, flat)
        return module

    def to_flat(self) -> nn.ModuleList:
        """The flat modules, the same ones."""
        flat = nn.ModuleList()
        share(flat, self)
        return flat

    def forward(self, inputs: Mapping[str, Tensor], *, tree: BroadcastTree) -> Tensor:
        """[rows of the level, K] from x [rows, K_l] of each level."""
        x = {name: cast(part) for name, part in in_order(inputs, self.widths).items()}
        layers = [_cross_layer(layer) for layer in self]
        with as_cast(next(iter(x.values()))):
            return cross(x, layers, tree=tree, level=self.level)

    def extra_repr(self) -> str:
        """Widths by level."""
        return described(self.widths) + ("" if self.level is None else f", level={self.level}")

    def __repr__(self) -> str:
        # nn.ModuleList leaves out extra_repr.
        return nn.Module.__repr__(self)


def _cross_layer(layer: nn.Module) -> CrossLayer:
    if isinstance(layer, nn.Linear):
        return MatrixCross(cast(layer.weight), None if layer.bias is None else cast(layer.bias))
    assert isinstance(layer, nn.Sequential)
    down, up = layer
    assert isinstance(down, nn.Linear)
    assert isinstance(up, nn.Linear)
    bias = None if up.bias is None else cast(up.bias)
    return LowRankCross(cast(up.weight), cast(down.weight), bias)


class TreeDotInteraction(nn.Module):
    """Dot products of all pairs of fields, whatever their levels (DLRM); without parameters.

    Args:
        level: level of the result; default the finest of the fields'.
        self_interaction: pairs of a field with itself too.
        order: of the pairs, `"tril"` (DLRM) or `"triu"` (torchrec); see `dot_interaction`.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> dots = TreeDotInteraction()
    >>> dots({"user": torch.randn(2, 3, 8), "item": torch.randn(3, 1, 8)}, tree=tree).shape
    torch.Size([3, 6])
    """

    def __init__(
        self, *, level: str | None = None, self_interaction: bool = False, order: str = "tril"
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        self.level, self.self_interaction, self.order = level, self_interaction, order

    def forward(self, fields: Mapping[str, Tensor], *, tree: BroadcastTree) -> Tensor:
        """[rows of the level, pairs] from fields [rows, F, D] of each level."""
        x = {name: cast(part) for name, part in fields.items()}
        with as_cast(next(iter(fields.values()))):
            return dot_interaction(
                x,
                tree=tree,
                level=self.level,
                self_interaction=self.self_interaction,
                order=self.order,
            )

    def extra_repr(self) -> str:
        """What was asked for."""
        at = "" if self.level is None else f"level={self.level}, "
        return f"{at}self_interaction={self.self_interaction}, order={self.order!r}"
