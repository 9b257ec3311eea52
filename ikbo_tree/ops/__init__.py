"""Public ops: they check a call once, turn names into routes and run a torch.library op."""

from ikbo_tree.ops.attention import self_target_attention, target_attention
from ikbo_tree.ops.cross_layers import (
    CrossLayer,
    LowRankCross,
    MatrixCross,
    MixtureCross,
    VectorCross,
    cross,
)
from ikbo_tree.ops.elementwise import add, film, gate, mul
from ikbo_tree.ops.embeddings import embedding
from ikbo_tree.ops.interactions import dot_interaction, factorization_machine
from ikbo_tree.ops.linear import linear, linear_compression
from ikbo_tree.ops.memories import Memory
from ikbo_tree.ops.norms import layer_norm, rms_norm
from ikbo_tree.ops.pooling import attention_pool, pool
from ikbo_tree.ops.ranking import listwise_softmax_loss, pairwise_logistic_loss, segment_topk
from ikbo_tree.ops.segments import broadcast, reduce, segment_softmax
from ikbo_tree.ops.silu_attention import silu_attention
from ikbo_tree.ops.weights import pad_weight

__all__ = [
    "CrossLayer",
    "LowRankCross",
    "MatrixCross",
    "Memory",
    "MixtureCross",
    "VectorCross",
    "add",
    "attention_pool",
    "broadcast",
    "cross",
    "dot_interaction",
    "embedding",
    "factorization_machine",
    "film",
    "gate",
    "layer_norm",
    "linear",
    "linear_compression",
    "listwise_softmax_loss",
    "mul",
    "pad_weight",
    "pairwise_logistic_loss",
    "pool",
    "reduce",
    "rms_norm",
    "segment_softmax",
    "segment_topk",
    "self_target_attention",
    "silu_attention",
    "target_attention",
]
