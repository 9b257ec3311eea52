"""Broadcast-free recommender models on trees of any depth.

>>> import ikbo_tree as ikbo
>>> tree = ikbo.BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
>>> tree
BroadcastTree(user 2 -> vendor 3 -> item 5, cpu)
"""

from ikbo_tree import nn
from ikbo_tree.errors import TreeError, UnsupportedError
from ikbo_tree.kernels.common.dispatch import implementation
from ikbo_tree.ops import (
    CrossLayer,
    LowRankCross,
    MatrixCross,
    Memory,
    MixtureCross,
    VectorCross,
    add,
    attention_pool,
    broadcast,
    cross,
    dot_interaction,
    embedding,
    factorization_machine,
    film,
    gate,
    layer_norm,
    linear,
    linear_compression,
    listwise_softmax_loss,
    mul,
    pad_weight,
    pairwise_logistic_loss,
    pool,
    reduce,
    rms_norm,
    segment_softmax,
    segment_topk,
    self_target_attention,
    silu_attention,
    target_attention,
)
from ikbo_tree.rewriting import rewrite
from ikbo_tree.tree import BroadcastTree, Plan, concat, plan, shard

__version__ = "0.1.0"

__all__ = [
    "BroadcastTree",
    "CrossLayer",
    "LowRankCross",
    "MatrixCross",
    "Memory",
    "MixtureCross",
    "Plan",
    "TreeError",
    "UnsupportedError",
    "VectorCross",
    "add",
    "attention_pool",
    "broadcast",
    "concat",
    "cross",
    "dot_interaction",
    "embedding",
    "factorization_machine",
    "film",
    "gate",
    "implementation",
    "layer_norm",
    "linear",
    "linear_compression",
    "listwise_softmax_loss",
    "mul",
    "nn",
    "pad_weight",
    "pairwise_logistic_loss",
    "plan",
    "pool",
    "reduce",
    "rewrite",
    "rms_norm",
    "segment_softmax",
    "segment_topk",
    "self_target_attention",
    "shard",
    "silu_attention",
    "target_attention",
]
