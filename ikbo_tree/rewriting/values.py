"""What the pass knows of a value: the rows it really has, and how the model's rows read them.

A finished model broadcasts with gathers. `Lazy` is a gather that has not been done yet. One axiom
carries it past other ops: if f treats a dim as a pure batch dim, then f(gather x) = gather f(x),
for any index. Nothing here looks at sizes to guess which batch a value belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx


@dataclass(frozen=True, eq=False)
class Map:
    """From the rows of a fine level to those of a coarse one; maps are told apart by identity.

    Attributes:
        name: in reports, as `item->user`.
        fine: level of its rows.
        coarse: level of the rows that it names.
        index: [rows of fine] integers, in the new graph.
        offsets: [rows of coarse + 1] of its inverse, or None: not known.
        order: of its inverse; None where the rows lie in order or `offsets` is None.
        live: live counts [1] of fine and coarse rows, for trees with a capacity.
    """

    name: str
    fine: str
    coarse: str
    index: fx.Node
    offsets: fx.Node | None = None
    order: fx.Node | None = None
    live: tuple[fx.Node, fx.Node] | None = None


class Merged(NamedTuple):
    """Sizes that share a dim with the rows: it is [outer, rows, inner] flattened.

    Attributes:
        outer: as the length in `view(length * batch, width)`.
        inner: as the heads in `view(length, batch * heads, width)`.
    """

    outer: int = 1
    inner: int = 1


ALONE = Merged()

Path: TypeAlias = tuple[Map, ...]
"""Maps from a fine level up, one after the other: (item->vendor, vendor->user)."""


@dataclass(frozen=True)
class Dense:
    """A value as the model has it.

    Attributes:
        node: the value in the new graph.
    """

    node: fx.Node


@dataclass(frozen=True)
class Lazy:
    """`node` gathered along `dim` by the composed `path`.

    Attributes:
        node: the coarse value in the new graph.
        path: how the model's rows find theirs; not empty.
        dim: the batch dim, the same of `node` and of the value.
        merged: what is merged with the rows in that dim.
    """

    node: fx.Node
    path: Path
    dim: int
    merged: Merged = ALONE


@dataclass(frozen=True)
class Index:
    """A value that is a map itself (or several, composed), in any integer dtype.

    Attributes:
        path: the maps.
        dtype: of the value; None: that of the last map.
    """

    path: Path
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Cat:
    """Parts one after the other along a dim that is no part's batch dim.

    Attributes:
        parts: each whole in itself, perhaps a `Cat` along another dim.
        widths: of the parts along `dim`.
        dim: counted from the front.
    """

    parts: tuple[Value, ...]
    widths: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class Later:
    """An op that is done in whole only if something takes its result in whole.

    Attributes:
        target: op overload.
        args: by the names of its schema.
        out: its result, as a fake tensor on fine rows.
    """

    target: Any
    args: dict[str, Any]
    out: torch.Tensor


Value: TypeAlias = "Dense | Lazy | Index | Cat | Later"


def common(paths: list[Path]) -> Path:
    """The longest beginning that all paths share: the coarsest level that carries all values."""
    shared = []
    for maps in zip(*paths, strict=False):
        if any(m is not maps[0] for m in maps):
            break
        shared.append(maps[0])
    return tuple(shared)


def shape(node: fx.Node) -> torch.Size:
    """Of a tensor in a graph, symbols and all."""
    value: torch.Size = node.meta["val"].shape
    return value


def describe(path: Path) -> str:
    """The levels of a path, as `item->vendor->user`; `itself` if it is empty."""
    return "->".join([path[0].fine, *(m.coarse for m in path)]) if path else "itself"
