"""Trees split at the root among processes: data-parallel training."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.tree.broadcast_tree import BroadcastTree

Costs: TypeAlias = Sequence[float] | NDArray[np.generic] | Tensor


def shard(
    tree: BroadcastTree, rank: int, world: int, *, by: str | Costs = "leaves"
) -> BroadcastTree:
    """The part of a tree that one of `world` processes works on: some root rows, all below them.

    Root rows go, the dearest first, to the shard with the least cost so far (of equal costs the
    lower row first, of equal shards the one with fewer rows, then the lower rank). So the dearest
    shard costs at most 4/3 of what the best split's dearest does (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969). Every process computes the same split from the same
    tree, without a word to the others. Rows keep their order; shards may be empty.

    `shard.origin(level)` says which rows of `tree` a shard has, to cut tensors by; side tables are
    whole in every shard. A shard has no spare capacity, and does not pack or unpack.

    Args:
        tree: the whole batch, equal in all processes.
        rank: which shard, 0 ... world - 1.
        world: how many shards.
        by: `"leaves"`: the rows without a level below them that hang below each root row; or a
            cost a root row, [rows of the root], numbers of any kind, not negative.

    Returns:
        The shard, on the tree's device.

    Raises:
        TreeError: no such rank, or costs that do not fit.

    >>> tree = BroadcastTree.from_counts({"item": [1, 5, 2, 2]}, root="user")
    >>> [shard(tree, rank, 2).origin("user").tolist() for rank in range(2)]
    [[1], [0, 2, 3]]
    >>> part = shard(tree, 1, 2)
    >>> scores = torch.arange(10.0)
    >>> scores[part.origin("item")]
    tensor([0., 6., 7., 8., 9.])
    """
    if world < 1:
        raise TreeError("world", "must be at least 1", str(world))
    if not 0 <= rank < world:
        raise TreeError("rank", f"must lie in 0 ... {world - 1}", str(rank))
    costs = _leaves(tree) if isinstance(by, str) else _checked(tree, by)
    if isinstance(by, str) and by != "leaves":
        raise TreeError("by", 'must be "leaves", or a cost a root row', repr(by))
    return tree.select(**{tree.levels[0]: np.flatnonzero(_owners(costs, world) == rank)})


def _owners(costs: NDArray[np.float64], world: int) -> NDArray[np.int64]:
    """The shard of each root row."""
    owners = np.zeros(len(costs), np.int64)
    shards = [(0.0, 0, rank) for rank in range(world)]
    for row in np.argsort(-costs, kind="stable").tolist():
        cost, rows, rank = shards[0]
        owners[row] = rank
        heapq.heapreplace(shards, (cost + float(costs[row]), rows + 1, rank))
    return owners


def _leaves(tree: BroadcastTree) -> NDArray[np.float64]:
    """[rows of the root]: how many rows without a level below them hang below each."""
    root = tree.levels[0]
    parents = {tree.parent(level) for level in tree.levels}
    found = np.zeros(tree.rows(root))
    for level in tree.levels:
        if level not in parents:
            offsets = tree.offsets(level, of=root).cpu().numpy()
            found += np.diff(offsets[: len(found) + 1])
    return found


def _checked(tree: BroadcastTree, by: Costs) -> NDArray[np.float64]:
    """Costs as float64; those of dead rows are left out."""
    root = tree.levels[0]
    rows = tree.rows(root)
    if isinstance(by, Tensor):
        by = by.detach().cpu().double().numpy()
    try:
        given = np.asarray(by, np.float64)
    except (TypeError, ValueError):
        raise TreeError("by", "must hold numbers", type(by).__name__) from None
    if given.shape not in ((rows,), (tree.capacity(root),)):
        raise TreeError("by", f"must have shape ({rows},), a root row each", f"{given.shape}")
    costs = given[:rows]
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if len(bad):
        rule = "must be finite and not negative"
        raise TreeError("by", rule, f"{costs[bad[0]]} at position {bad[0]}")
    return costs
