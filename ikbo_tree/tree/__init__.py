"""`BroadcastTree` and what belongs to it.

schema.py          what a tree's tensors are and in which order; routes from tensors
maps.py            what ops read off a tree
broadcast_tree.py  the class: constructors, moving, merging
construct.py       bodies of the constructors      merge.py   bodies of select, concat, to, pack
host.py            the host's copy of the maps     plan.py    tiles in a good order
stats.py           fan-outs and costs              picture.py repr and show
pytree.py          trees as inputs of compiled and exported functions
pickling.py        a tree as plain data     shard.py   trees split among processes
"""

from ikbo_tree.tree.broadcast_tree import BroadcastTree, concat
from ikbo_tree.tree.plan import Plan, plan
from ikbo_tree.tree.pytree import register
from ikbo_tree.tree.shard import shard
from ikbo_tree.tree.stats import LevelStats, TreeStats

register()

__all__ = ["BroadcastTree", "LevelStats", "Plan", "TreeStats", "concat", "plan", "shard"]
