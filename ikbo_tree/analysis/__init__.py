"""What work costs: operations and bytes by op and level, flat and on a tree, and the least time.

One function for each op of `ikbo_tree`, under the op's name, takes a tree and widths in place of
tensors, and gives the op's `Comparison`: on the tree, and flat.

    found = analysis.linear(tree, {"user": 1178, "item": 866}, 433, dtype=torch.float16)
    found.tree.total.intensity, found.flat.seconds(analysis.Ceilings.from_results(path))

broadcasting(log, ...)    what copies cost for a log of requests
of_model(model, ...)      a model's graph, op by op
Ceilings                  what a device does at most, measured: from a results file, or given

cost.py  ceilings.py  call.py (rows of one call)  products.py  attention.py  rowwise.py  segments.py
"""

from ikbo_tree.analysis.attention import self_target_attention, silu_attention, target_attention
from ikbo_tree.analysis.ceilings import Ceilings
from ikbo_tree.analysis.cost import Comparison, Cost, Step, Work
from ikbo_tree.analysis.logs import Broadcasting, broadcasting
from ikbo_tree.analysis.model import of_model
from ikbo_tree.analysis.products import (
    cross,
    dot_interaction,
    factorization_machine,
    linear,
    linear_compression,
)
from ikbo_tree.analysis.rowwise import add, film, gate, layer_norm, mul, rms_norm
from ikbo_tree.analysis.segments import (
    attention_pool,
    broadcast,
    embedding,
    listwise_softmax_loss,
    pairwise_logistic_loss,
    pool,
    reduce,
    segment_softmax,
    segment_topk,
)

__all__ = [
    "Broadcasting",
    "Ceilings",
    "Comparison",
    "Cost",
    "Step",
    "Work",
    "add",
    "attention_pool",
    "broadcast",
    "broadcasting",
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
    "of_model",
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
