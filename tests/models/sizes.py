"""The frozen widths of the model zoo: what benchmarks and tests build, and nothing else.

Coarse-to-fine width ratio 1:1: user, vendor and item features, embeddings and towers are equally
wide (one number serves all levels). `SIZES` are for timing: each flat model does at least 60 GFLOP
for 1,024 items at 64 items a user (held by `test_zoo.py`), 0.9 ms at the peak of an H200 in float32
(67 TFLOP/s, TF32 off). `TINY` has the same structure at widths of 4 to 16, for correctness.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model; a model ignores what it has no use for.

    Attributes:
        width: of embeddings, tokens and what towers give out.
        dense: float features of a row, or of an event of a history.
        fields: categorical features of a row.
        history: events of a history or entries of a catalogue, padding included.
        tokens: of an item, where it has several.
        heads: attention heads.
        layers: repeated blocks.
        rank: columns of the factorisation machine's projection.
        inner: hidden widths inside a block (bottom, attention and feed-forward MLPs).
        hidden: hidden widths of towers and of the last MLP.
        vocabulary: rows of each embedding table.
        tasks: logits an item.
        dtype: of parameters and float inputs.
    """

    width: int
    dense: int
    fields: int = 0
    history: int = 0
    tokens: int = 0
    heads: int = 0
    layers: int = 0
    rank: int = 0
    inner: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    vocabulary: int = 10_000
    tasks: int = 1
    dtype: torch.dtype = torch.float32


SIZES = {
    "dlrm": Sizes(
        width=128,
        dense=512,
        fields=26,
        history=50,
        inner=(4096, 2048),
        hidden=(4096, 2048, 1024),
        vocabulary=2_000,
    ),
    "dcn_v2": Sizes(width=64, dense=256, fields=16, layers=3, inner=(4096, 1024)),
    "din": Sizes(width=128, dense=256, history=100, inner=(512, 64), hidden=(512, 256)),
    "wukong": Sizes(
        width=64, dense=512, fields=16, layers=3, rank=24, inner=(2048,), hidden=(2048,)
    ),
    "bst": Sizes(width=256, dense=256, history=32, heads=4, layers=1, inner=(1024,), hidden=(512,)),
    "hstu": Sizes(width=256, dense=32, history=36, heads=4, layers=2, hidden=(512,), tasks=3),
    "phoenix": Sizes(width=256, dense=128, history=31, heads=4, layers=2, inner=(688,), tasks=4),
    "two_tower": Sizes(
        width=256, dense=128, history=32, tokens=8, layers=2, inner=(768,), hidden=(512,)
    ),
    "ads": Sizes(
        width=256, dense=512, history=32, heads=4, inner=(512,), hidden=(1024, 512), tasks=2
    ),
}

# Capture with 17, 19 and 23 rows or so: no width of a tiny model is one of them by coincidence.
TINY = {
    "dlrm": Sizes(8, 6, fields=3, history=5, inner=(12,), hidden=(16,), vocabulary=11),
    "dcn_v2": Sizes(4, 6, fields=3, layers=2, inner=(16, 10), vocabulary=11),
    "din": Sizes(8, 6, history=5, inner=(16, 10), hidden=(12,), vocabulary=11),
    "wukong": Sizes(8, 6, fields=3, layers=2, rank=4, inner=(16,), hidden=(10,), vocabulary=11),
    "bst": Sizes(8, 6, history=5, heads=2, layers=2, inner=(16,), hidden=(12,), vocabulary=11),
    "hstu": Sizes(8, 6, history=5, heads=2, layers=2, hidden=(12,), vocabulary=11, tasks=3),
    "phoenix": Sizes(8, 6, history=5, heads=2, layers=2, inner=(12,), tasks=4),
    "two_tower": Sizes(
        8, 6, history=5, tokens=4, layers=2, inner=(16,), hidden=(12,), vocabulary=11
    ),
    "ads": Sizes(8, 6, history=5, heads=2, inner=(16,), hidden=(12,), vocabulary=11, tasks=2),
}
