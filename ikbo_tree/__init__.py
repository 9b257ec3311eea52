"""Broadcast-free recommender models on trees of any depth.

>>> import ikbo_tree as ikbo
>>> tree = ikbo.BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
>>> tree
BroadcastTree(user 2 -> vendor 3 -> item 5, cpu)
"""

from ikbo_tree.errors import TreeError, UnsupportedError
from ikbo_tree.kernels.common.dispatch import implementation
from ikbo_tree.ops import (
    Memory,
    broadcast,
    linear,
    linear_compression,
    reduce,
    segment_softmax,
    self_target_attention,
    target_attention,
)
from ikbo_tree.rewriting import rewrite
from ikbo_tree.tree import BroadcastTree, Plan, concat, plan

__version__ = "0.1.0"

__all__ = [
    "BroadcastTree",
    "Memory",
    "Plan",
    "TreeError",
    "UnsupportedError",
    "broadcast",
    "concat",
    "implementation",
    "linear",
    "linear_compression",
    "plan",
    "reduce",
    "rewrite",
    "segment_softmax",
    "self_target_attention",
    "target_attention",
]
