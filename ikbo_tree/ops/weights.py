"""Weights as GPU kernels like to read them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

ROW_BYTES = 16
"""What copies by hardware (TMA) and whole vectors want rows to be multiples of."""


def pad_weight(weight: Tensor) -> Tensor:
    """The same weight in rows that begin at multiples of 16 bytes, once for all calls.

    GPU implementations of `linear` and `linear_compression` read such rows in place. Others, as of
    866 half-precision columns, they copy in every call; a server pads its weights once, when it
    loads them. Padding is exact.

    Args:
        weight: [..., K], any dtype and device.

    Returns:
        `weight` itself where its rows are dense and lie so already. Else a view [..., K] of a new
        buffer [..., K + a few zeros]. Gradients pass through; a parameter that is trained should
        stay as it is.

    >>> import torch
    >>> w = pad_weight(torch.ones(3, 5, dtype=torch.float16))
    >>> w.shape, w.stride()
    (torch.Size([3, 5]), (8, 1))
    """
    unit = max(1, ROW_BYTES // weight.element_size())
    width = weight.shape[-1]
    steps = [s for s, n in zip(weight.stride()[:-1], weight.shape[:-1], strict=True) if n > 1]
    dense = width <= 1 or weight.stride(-1) == 1
    if dense and all(step % unit == 0 for step in steps) and weight.data_ptr() % ROW_BYTES == 0:
        return weight
    # A row of zeros more where nothing is missing: a view that lies badly becomes a copy.
    missing = -width % unit or unit
    return pad(weight, (0, missing))[..., :width]


__all__ = ["pad_weight"]
