"""Inputs that micro-models name in their signature, made at random for a tree.

A model's arguments say what it takes: `u` is 6 floats a user, `idx` the map from items to users.
Every value depends on the seed and the input's name alone. The widths are none of the row counts of
`trees.EXAMPLE`, so capture cannot take a width for a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ikbo_tree import BroadcastTree

WORDS = 10  # rows of every vocabulary

Make = Callable[[int, BroadcastTree, torch.Generator], Tensor]


@dataclass(frozen=True)
class Input:
    """A feature, a map, or counts; `coarse` names the level that a map or counts refer to."""

    level: str
    make: Make
    kind: str = "feature"
    coarse: str = ""


def floats(*shape: int) -> Make:
    return lambda rows, tree, g: torch.randn(rows, *shape, generator=g)


def positive(*shape: int) -> Make:
    return lambda rows, tree, g: torch.rand(rows, *shape, generator=g) + 0.5


def integers(low: int, high: int, *shape: int) -> Make:
    return lambda rows, tree, g: torch.randint(low, high, (rows, *shape), generator=g)


def mask(*shape: int) -> Make:
    """True with probability 1/2, and always in the first place: no row is masked whole."""

    def make(rows: int, tree: BroadcastTree, g: torch.Generator) -> Tensor:
        drawn = torch.rand(rows, *shape, generator=g) < 0.5
        drawn[:, 0] = True
        return drawn

    return make


def rows_of(level: str) -> Make:
    """An index of rows of `level` that is no broadcast: any row, any order."""
    return lambda rows, tree, g: torch.randint(0, tree.rows(level), (rows,), generator=g)


def ancestors(fine: str, coarse: str, dtype: torch.dtype = torch.int64) -> Input:
    def make(rows: int, tree: BroadcastTree, g: torch.Generator) -> Tensor:
        return tree.ancestors(fine, of=coarse).to(dtype)

    return Input(fine, make, "map", coarse)


def unsorted(fine: str, coarse: str) -> Input:
    """The same map with the fine rows in any order."""

    def make(rows: int, tree: BroadcastTree, g: torch.Generator) -> Tensor:
        index = tree.ancestors(fine, of=coarse).long()
        return index[torch.randperm(rows, generator=g)]

    return Input(fine, make, "map", coarse)


def counts(coarse: str, fine: str) -> Input:
    def make(rows: int, tree: BroadcastTree, g: torch.Generator) -> Tensor:
        return tree.offsets(fine, of=coarse).long().diff()

    return Input(coarse, make, "counts", fine)


def spoilt(make: Make, value: float) -> Make:
    """`make`, with a value in the rows of users without items that no use of them survives."""

    def made(rows: int, tree: BroadcastTree, g: torch.Generator) -> Tensor:
        x = make(rows, tree, g)
        x[tree.offsets("item", of="user").diff() == 0] = value
        return x

    return made


INPUTS: dict[str, Input] = {
    "u": Input("user", floats(6)),
    "u2": Input("user", floats(6)),
    "u8": Input("user", floats(8)),
    "uw": Input("user", floats(24)),
    "v": Input("vendor", floats(6)),
    "vw": Input("vendor", floats(18)),
    "i": Input("item", floats(6)),
    "i2": Input("item", floats(6)),
    "i8": Input("item", floats(8)),
    # four tokens a row
    "ut": Input("user", floats(4, 6)),
    "ut2": Input("user", floats(4, 6)),
    "vt": Input("vendor", floats(4, 6)),
    "it": Input("item", floats(4, 6)),
    # histories, and queries as wide
    "hist": Input("user", floats(7, 8)),
    "hist2": Input("user", floats(9, 8)),
    "vhist": Input("vendor", floats(9, 8)),
    "q": Input("item", floats(8)),
    "qs": Input("item", floats(2, 8)),
    "q16": Input("item", floats(16)),
    # what belongs to histories
    "lengths": Input("user", integers(1, 8)),
    "short": Input("user", integers(0, 8)),
    "valid": Input("user", mask(7)),
    "vvalid": Input("vendor", mask(7)),
    "ivalid": Input("item", mask(7)),
    "recent": Input("user", floats(7)),
    # other kinds
    "up": Input("user", positive(6)),
    "up2": Input("user", positive(6)),
    "ub": Input("user", mask(6)),
    "ib": Input("item", mask(6)),
    "un": Input("user", integers(0, 50, 6)),
    "un2": Input("user", integers(0, 50, 6)),
    "us": Input("user", floats()),
    "vs": Input("vendor", floats()),
    # ids of vocabularies
    "uid": Input("user", integers(0, WORDS)),
    "ids": Input("user", integers(0, WORDS, 7)),
    "vid": Input("vendor", integers(0, WORDS)),
    "iid": Input("item", integers(0, WORDS)),
    "pos": Input("user", integers(0, 6, 2)),
    "bad_ids": Input("user", spoilt(integers(0, WORDS, 7), 10_000)),
    "u_nan": Input("user", spoilt(floats(6), float("nan"))),
    # indices of rows that are no broadcast
    "perm": Input("item", rows_of("item")),
    "other": Input("item", rows_of("user")),
    "friend": Input("user", rows_of("user")),
    # the tree's maps
    "idx": ancestors("item", "user"),
    "idx2": ancestors("item", "user"),
    "idx32": ancestors("item", "user", torch.int32),
    "any_idx": unsorted("item", "user"),
    "iv": ancestors("item", "vendor"),
    "vu": ancestors("vendor", "user"),
    "counts": counts("user", "item"),
    "vcounts": counts("vendor", "item"),
    "ucounts": counts("user", "vendor"),
}


def make_input(name: str, tree: BroadcastTree, seed: int) -> Tensor:
    declared = INPUTS[name]
    g = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return declared.make(tree.rows(declared.level), tree, g)
