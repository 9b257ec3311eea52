"""What broadcasting costs for a log of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.analysis.ceilings import Ceilings
from ikbo_tree.analysis.cost import Comparison, readable
from ikbo_tree.analysis.products import linear
from ikbo_tree.errors import TreeError
from ikbo_tree.extras import require
from ikbo_tree.tree import BroadcastTree
from ikbo_tree.tree.stats import QUANTILES, TreeStats


@dataclass(frozen=True)
class Broadcasting:
    """The price of copying coarse rows to the items of a log.

    Attributes:
        tree: the log as one batch.
        stats: rows, fan-outs, and for each level the bytes that copies write and the operations
            that a linear map spends on them.
        linear: that linear map in both forms.
    """

    tree: BroadcastTree
    stats: TreeStats
    linear: Comparison

    def show(self, ceilings: Ceilings | None = None) -> None:
        """Prints levels and the linear map in both forms (needs rich).

        Args:
            ceilings: of a device, for the least times.
        """
        make = require("rich.table", "cli").Table
        quantiles = ", ".join(f"{q:g}" for q in QUANTILES)
        columns = ("level", "rows", "copies of a row", f"fan-out at {quantiles}", "MB copied")
        levels = make(*columns, "MFLOP on copies", title="what copies cost")
        for name, level in self.stats.levels.items():
            fan_out = ", ".join(f"{n:g}" for n in level.fan_out)
            numbers = (level.extra_bytes / 1e6, level.extra_flops / 1e6)
            cells = (name, f"{level.rows:,}", f"{level.copies:,.1f}", fan_out)
            levels.add_row(*cells, *map(readable, numbers))
        require("rich.console", "cli").Console().print(levels)
        self.linear.show(ceilings)


def broadcasting(
    log: Sequence[int] | np.ndarray | Tensor | Mapping[str, Any] | BroadcastTree,
    *,
    widths: Mapping[str, int],
    out: int = 1,
    levels: tuple[str, str] = ("user", "item"),
    dtype: torch.dtype = torch.float32,
) -> Broadcasting:
    """What it costs to copy coarse features to the items of a log before a linear map.

    Args:
        log: items of each request, one number a request; or for each level above the items, outer
            to inner, the key of every item (integers or strings), e.g. `{"request": ..., "vendor":
            ...}`; or a tree. A user of several requests is one row of a level `"user"`: name a
            column of requests where each request has its own copy.
        widths: elements of a row at each level that has features, the items' among them.
        out: columns of the linear map.
        levels: with numbers the two levels' names; with keys the last one names the items.
        dtype: of the elements.

    Raises:
        TreeError: negative numbers, keys of unequal lengths, widths of unknown levels.

    >>> found = broadcasting([64] * 16, widths={"user": 512, "item": 512}, out=256)
    >>> found.stats.extra_bytes, found.stats.extra_flops
    (2064384, 264241152)
    """
    if isinstance(log, BroadcastTree):
        tree = log
    elif isinstance(log, Mapping):
        tree = _of_keys(log, levels[1])
    else:
        tree = BroadcastTree.from_counts({levels[1]: log}, root=levels[0])
    every = dict.fromkeys(tree.levels, 0) | dict(widths)
    stats = tree.stats(widths=every, out=out, dtype=dtype)
    return Broadcasting(tree, stats, linear(tree, widths, out, level=stats.finest, dtype=dtype))


def _of_keys(keys: Mapping[str, Any], items: str) -> BroadcastTree:
    if not keys:
        raise TreeError("log", "must have a column of keys", "none")
    if items in keys:
        raise TreeError("levels", "must name the items by a name that no column has", repr(items))
    numbers = np.arange(len(next(iter(keys.values()))))
    return BroadcastTree.from_keys({**keys, items: numbers})
