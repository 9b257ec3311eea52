"""`ikbo_tree::linear_compression`: embeddings stacked over levels, compressed by a linear map."""

from __future__ import annotations

from torch import Tensor

from ikbo_tree.kernels.common import dispatch, stages

IMPLEMENTATIONS = dispatch.Implementations(
    "linear_compression",
    __package__,
    {
        "reference": "reference",
        "torch": "torch_impl",
        "triton": "triton_kernel",
        "gluon": "gluon_sm90",
    },
    {"cuda": ("gluon", "triton", "torch"), "default": ("torch",)},
)


def out_shape(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Of the result, from the last stage's arguments."""
    return x.shape[0], weight.shape[0], x.shape[2]


linear_compression = stages.define("linear_compression", IMPLEMENTATIONS, out_shape, bias=False)
"""`(x, weight, *stages, partial_dtype, impl) -> [rows of the last stage, M, N]`: x[s]
[rows_s, K_s, N], weight[s] [M, K_s], all of one float dtype, on one device; K_s may be 0. Stages,
coarse first, as `kernels.common.stages.Stages`; dead rows are zero. Its implementations get None
for the bias."""
