"""What attention costs: products of queries with keys and of weights with values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ikbo_tree.analysis.call import INDEX, Call, Lengths, entries, seen
from ikbo_tree.analysis.cost import Comparison, Cost, Step, Work
from ikbo_tree.tree import BroadcastTree


def target_attention(
    tree: BroadcastTree,
    keys: Mapping[str, Lengths],
    *,
    level: str,
    dim: int,
    heads: int = 1,
    n_seed: int = 1,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.target_attention` costs: its products, and each key and value read once.

    The flat form copies keys and values to each row of `level`; operations are the same.

    Args:
        tree: the tree.
        keys: S of each level or table, or a number for each of its rows.
        level: the level of the queries.
        dim: D, of queries and keys.
        heads: H.
        n_seed: query rows for each row of `level`.
        kv_heads: Hkv; default `heads`.
        value_dim: Dv; default `dim`.
        dtype: of all tensors.

    Raises:
        TreeError: unknown names, a name not above `level`, lengths that do not fit.
    """
    sizes = _Heads(dim, value_dim or dim, heads, kv_heads or heads, n_seed)
    return _attention("target_attention", tree, keys, level, sizes, dtype)


def silu_attention(
    tree: BroadcastTree,
    keys: Mapping[str, Lengths],
    *,
    level: str,
    dim: int,
    heads: int = 1,
    n_seed: int = 1,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.silu_attention` costs; see `target_attention`."""
    sizes = _Heads(dim, value_dim or dim, heads, kv_heads or heads, n_seed)
    return _attention("silu_attention", tree, keys, level, sizes, dtype)


def self_target_attention(
    tree: BroadcastTree,
    keys: Lengths,
    *,
    level: str,
    of: str,
    dim: int,
    heads: int = 1,
    n_seed: int = 1,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.self_target_attention` costs.

    The flat form copies histories to each row of `level` first, with their queries, so each of
    these rows attends from a history to itself.

    Args:
        tree: the tree.
        keys: S, or a number for each row of `of`.
        level: the level of the targets' queries.
        of: the level or table of the histories.
        dim: D.
        heads: H.
        n_seed: query rows for each row of `level`.
        kv_heads: Hkv; default `heads`.
        value_dim: Dv; default `dim`.
        causal: each entry of a history attends to those up to it.
        dtype: of all tensors.

    Raises:
        TreeError: as in `target_attention`.
    """
    sizes = _Heads(dim, value_dim or dim, heads, kv_heads or heads, n_seed)
    target = _attention("self_target_attention", tree, {of: keys}, level, sizes, dtype)
    lengths = entries("keys", keys, tree, of)
    scores = lengths * (lengths + 1) // 2 if causal else lengths**2
    size, queries = dtype.itemsize, heads * sizes.widths
    own = Cost(2 * int(scores.sum()) * queries, int(lengths.sum()) * queries * size)
    tree_steps = (Step("self_target_attention", of, own), *target.tree.steps)
    # The targets' copies of keys and values serve both; those of the queries come on top.
    met = int(seen(lengths, tree, level, of).sum())
    flops = 2 * int(seen(scores, tree, level, of).sum()) * queries
    copied = (min(int(lengths.sum()), met) + met) * heads * dim * size
    attended = Cost(flops, met * (queries + sizes.entry) * size)
    flat = (*target.flat.steps, Step("self_attention", level, attended))
    if of != level:
        flat = (Step("broadcast", of, Cost(0, copied)), *flat)
    return Comparison(Work(tree_steps), Work(flat))


class _Heads:
    """Sizes of one call.

    Attributes:
        widths: D + Dv.
        entry: elements of one key and value.
        row: elements of the queries and results of one row.
        queries: query rows of one row, over all heads.
    """

    def __init__(self, dim: int, value_dim: int, heads: int, kv_heads: int, n_seed: int) -> None:
        self.widths = dim + value_dim
        self.entry = kv_heads * self.widths
        self.row = n_seed * heads * self.widths
        self.queries = n_seed * heads


def _attention(
    op: str,
    tree: BroadcastTree,
    keys: Mapping[str, Lengths],
    level: str,
    sizes: _Heads,
    dtype: torch.dtype,
) -> Comparison:
    call = Call(tree, tuple(keys), level, dtype, "keys")
    rows = call.rows()
    lengths = {n: entries(f'keys["{n}"]', s, tree, n) for n, s in keys.items()}
    met = {n: int(seen(found, tree, level, n).sum()) for n, found in lengths.items()}
    flops = 2 * sum(met.values()) * sizes.queries * sizes.widths
    own = Step(op, level, Cost(flops, rows * sizes.row * call.size))
    read, copies = [], []
    for name, found in lengths.items():
        moved = int(found.sum()) * sizes.entry * call.size
        index = 0 if name == level else INDEX * rows
        read.append(Step(op, name, Cost(0, moved + index)))
        copied = met[name] * sizes.entry * call.size
        if name != level:
            cost = Cost(0, min(moved, copied) + index + copied)
            copies.append(Step("broadcast", name, cost))
    everything = sum(met.values()) * sizes.entry * call.size
    if len(lengths) > 1:
        copies.append(Step("concatenate", level, Cost(0, 2 * everything)))
    flat = Step(op, level, own.cost.plus(Cost(0, everything)))
    return Comparison(Work((*read, own)), Work((*copies, flat)))
