"""Frozen tiles of `linear_compression`."""

from __future__ import annotations

import functools

import torch

from ikbo_tree.kernels.common.gemm_config import (
    SMALL,
    SMALL_PERSISTENT,
    Choice,
    Table,
    family,
    tuned_choice,
)
from ikbo_tree.kernels.common.gemm_forms import Tile

# H200, fp16, M=433, N=256, K 866 and 1178, 1024 rows below 15, medians of interleaved runs with a
# cold L2 against cuBLAS' product of the same operands: of 30 forms of the forward product this one
# took the least time (0.88 of cuBLAS on unpadded W); parts=4 0.90, descriptor stores 0.93,
# persistent 0.92, 128x128 0.92, 64x256 0.95, BK=128 1.10.
_HOPPER = Choice(Tile(BM=128, BN=256, BK=64, warps=8, stages=4, parts=2, short=True), True)
# 15 rows make few tiles, so small ones: 8 warps 1.70, 4 warps 2.39, 128x256 2.04.
_HOPPER_PARTIAL = Choice(Tile(BM=64, BN=128, BK=64, warps=8, stages=4, parts=1), True, 2)
# Nothing is gathered, so the next tile's loads run under the store: 0.95; not persistent 1.25.
_HOPPER_INPUT_GRADIENT = Choice(
    Tile(BM=128, BN=256, BK=64, warps=8, stages=4, parts=2, persistent=True, described_out=True),
    True,
)
# 0.635 of cuBLAS' batched product and its sum; 128x256 0.69, 128x128 0.65 with two programs.
_HOPPER_WEIGHT_GRADIENT = Choice(Tile(BM=256, BN=128, BK=64, warps=8, stages=4), True)
_AMPERE = Choice(Tile(BM=128, BN=128, BK=32, warps=4, stages=4, parts=4, short=True))
_ADA = Choice(Tile(BM=128, BN=128, BK=32, warps=4, stages=3, parts=4, short=True))
_AMD = Choice(Tile(BM=128, BN=128, BK=32, warps=4, stages=2, parts=4))
_PLAIN = Choice(Tile(BM=64, BN=64, BK=16, warps=4, stages=3))

TABLE: Table = {
    "sm_90": {
        "forward": _HOPPER,
        "partial": _HOPPER_PARTIAL,
        "input_gradient": _HOPPER_INPUT_GRADIENT,
        "weight_gradient": _HOPPER_WEIGHT_GRADIENT,
    },
    "sm_80": {
        "forward": _AMPERE,
        "partial": _AMPERE,
        "input_gradient": _AMPERE,
        "weight_gradient": _AMPERE,
    },
    "sm_86": {
        "forward": _ADA,
        "partial": _ADA,
        "input_gradient": _ADA,
        "weight_gradient": _ADA,
    },
    "gfx": {"forward": _AMD, "partial": _AMD, "input_gradient": _AMD, "weight_gradient": _AMD},
    "float32": {
        "forward": _PLAIN,
        "partial": _PLAIN,
        "input_gradient": _PLAIN,
        "weight_gradient": _PLAIN,
    },
    "interpreter": {
        "forward": SMALL,
        "partial": SMALL,
        "input_gradient": SMALL_PERSISTENT,
        "weight_gradient": SMALL,
    },
}


def choose(role: str, arch: str, dtype: torch.dtype, M: int, N: int) -> Choice:
    """The tile for a product of M rows and N columns a row of the tree.

    Args:
        role: one of `gemm_config.ROLES`.
        arch: from `gemm_forms.architecture`.
        dtype: of the operands.
        M: rows of one row's result (of the whole result for `"weight_gradient"`).
        N: its columns.
    """
    found = tuned_choice("linear_compression", role, arch, dtype, M, N)
    return found or _frozen(role, arch, dtype, M, N)


@functools.cache
def _frozen(role: str, arch: str, dtype: torch.dtype, M: int, N: int) -> Choice:
    return TABLE[family(arch, dtype)][role].fitted(M, N)
