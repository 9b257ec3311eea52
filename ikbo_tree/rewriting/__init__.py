"""The pass that makes a finished PyTorch model broadcast-free: `ikbo_tree.rewrite`.

api         the public function
inputs      what the caller declares of a model's inputs; random_inputs that keep to it
capture     the model as one graph of ATen ops
refusals    what is refused, and why
values      what is known of a value: Dense, Lazy (a gather put off), Index (a map), Cat
rowwise     which ops treat a dim as a batch: the rules, as data (rowwise_views, _products: more)
engine      interprets one op by these rules; special ones: gathers, splitting, norms, blocks,
            attention, bags; lookups keeps ids in range
graph_pass  interprets the whole graph; builder writes the new one, product makes a module of it
wide        split products of 16-bit values, by ops that keep float32
lineage     the level of each value of the new graph
capacity    rows beyond the live ones
ranges      how many rows levels may have
ahead       AOTInductor
cost        operations and bytes of a graph; profit: which rewrites save any
dynamo      the same pass as a backend of torch.compile
validate    compares both graphs, op by op, in float64
report      what was done; picture draws it
"""

from ikbo_tree.rewriting.api import rewrite
from ikbo_tree.rewriting.dynamo import backend, declared_inputs

__all__ = ["backend", "declared_inputs", "rewrite"]
