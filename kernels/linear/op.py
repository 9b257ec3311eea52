"""`ikbo_tree::linear`: a linear map of a concatenation over levels that nobody materialises."""

from __future__ import annotations

from torch import Tensor

from ikbo_tree.kernels.common import dispatch, stages

IMPLEMENTATIONS = dispatch.Implementations(
    "linear",
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
    return x.shape[0], weight.shape[0]


linear = stages.define("linear", IMPLEMENTATIONS, out_shape, bias=True)
"""`(x, weight, bias, *stages, partial_dtype, impl) -> [rows of the last stage, N]`: x[s]
[rows_s, K_s], weight[s] [N, K_s], bias [N] or None, all of one float dtype, on one device; K_s may
be 0. Stages, coarse first, as `kernels.common.stages.Stages`; dead rows are zero."""
