"""Modules over the features of several levels, with the parameters of their flat equivalents.

A module's `forward` takes a mapping from level to tensor, each at its own level's batch size, and
the tree. `from_flat` makes one that shares a flat module's parameters, `to_flat` goes back, and
state dicts load into either. Autocast, `torch.compile(fullgraph=True)` and activation checkpointing
work as for torch's own modules.
"""

from ikbo_tree.nn.attention import TreeTargetAttention, TreeTransformerBlock
from ikbo_tree.nn.hstu import HSTULayer, TreeHSTU
from ikbo_tree.nn.interactions import TreeCrossNet, TreeDotInteraction
from ikbo_tree.nn.linear import TreeLinear, TreeLinearCompression, TreeMLP

__all__ = [
    "HSTULayer",
    "TreeCrossNet",
    "TreeDotInteraction",
    "TreeHSTU",
    "TreeLinear",
    "TreeLinearCompression",
    "TreeMLP",
    "TreeTargetAttention",
    "TreeTransformerBlock",
]
