"""Frozen tiles of `linear`."""

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

_HOPPER = Choice(Tile(BM=128, BN=128, BK=64, warps=4, stages=3, parts=4), True, 2)
_AMPERE = Choice(Tile(BM=128, BN=128, BK=32, warps=4, stages=4, parts=4))
_ADA = Choice(Tile(BM=128, BN=128, BK=32, warps=4, stages=3, parts=4))
_AMD = Choice(Tile(BM=128, BN=128, BK=32, warps=4, stages=2, parts=4))
_PLAIN = Choice(Tile(BM=64, BN=64, BK=16, warps=4, stages=3))


def _everywhere(choice: Choice) -> dict[str, Choice]:
    return dict.fromkeys(("forward", "partial", "input_gradient", "weight_gradient"), choice)


TABLE: Table = {
    "sm_90": _everywhere(_HOPPER),
    "sm_80": _everywhere(_AMPERE),
    "sm_86": _everywhere(_ADA),
    "gfx": _everywhere(_AMD),
    "float32": _everywhere(_PLAIN),
    "interpreter": _everywhere(SMALL) | {"input_gradient": SMALL_PERSISTENT},
}

_ROWS = 2**20
"""Stands for the row count, which no choice may depend on."""


def choose(role: str, arch: str, dtype: torch.dtype, N: int, K: int | None = None) -> Choice:
    """The tile for a product with N columns.

    Args:
        role: one of `gemm_config.ROLES`.
        arch: from `gemm_forms.architecture`.
        dtype: of the operands.
        N: columns of the result; its rows for `"weight_gradient"`.
        K: columns of the result of `"weight_gradient"`.
    """
    sizes = (N,) if K is None else (N, K)
    return tuned_choice("linear", role, arch, dtype, *sizes) or _frozen(role, arch, dtype, N, K)


@functools.cache
def _frozen(role: str, arch: str, dtype: torch.dtype, N: int, K: int | None) -> Choice:
    choice = TABLE[family(arch, dtype)][role]
    return choice.fitted(_ROWS, N) if K is None else choice.fitted(N, K)
