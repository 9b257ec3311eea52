"""Operations and bytes of linear compression and attention, by `ikbo_tree.analysis`."""

from __future__ import annotations

import functools

import attention_data
import bench_lce
import numpy as np
import torch

import ikbo_tree as ikbo
from ikbo_tree import analysis
from ikbo_tree.analysis import Comparison, Cost


def cost(workload: str, form: str) -> Cost:
    """What a workload costs in 16 bits.

    Args:
        workload: `lce...` or `attn...`, as results files have it.
        form: `"tree"`; `"flat"`: copies made, then the op; `"op"`: the flat op alone.
    """
    comparison = _comparison(workload)
    if form == "op":
        op = "linear_compression" if workload.startswith("lce") else "target_attention"
        return comparison.flat.by_op()[op]
    return (comparison.tree if form == "tree" else comparison.flat).total


@functools.cache
def _comparison(workload: str) -> Comparison:
    if workload.startswith("lce"):
        tree = bench_lce.tree_of(workload)
        widths = {level: bench_lce.WIDTHS[level] for level in tree.levels}
        M, N = bench_lce.M, bench_lce.N
        return analysis.linear_compression(tree, widths, M, N, dtype=torch.float16)
    one = attention_workload(workload)
    tree = ikbo.BroadcastTree.from_counts(one.counts, root="user")
    keys = {level: one.keys_of(level) for level in tree.levels[:-1]}
    return analysis.target_attention(
        tree,
        keys,
        level="item",
        dim=one.dim,
        heads=one.heads,
        n_seed=one.n,
        dtype=torch.float16,
    )


def attention_workload(name: str) -> attention_data.Workload:
    """One that is measured, or 32 users with as many items as the name says."""
    known = attention_data.sweeps() | attention_data.workloads()
    if name in known:
        return known[name]
    _, keys, ratio, n, *_ = name.split("-")
    counts = {"item": np.full(32, int(ratio[1:]))}
    return attention_data.Workload(name, counts, int(keys[1:]), int(n[1:]))
