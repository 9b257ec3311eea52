"""Public ops: they check a call once, turn names into routes and run a torch.library op."""

from ikbo_tree.ops.attention import self_target_attention, target_attention
from ikbo_tree.ops.linear import linear, linear_compression
from ikbo_tree.ops.memories import Memory
from ikbo_tree.ops.segments import broadcast, reduce, segment_softmax

__all__ = [
    "Memory",
    "broadcast",
    "linear",
    "linear_compression",
    "reduce",
    "segment_softmax",
    "self_target_attention",
    "target_attention",
]
