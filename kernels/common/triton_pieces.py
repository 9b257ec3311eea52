"""Float32 values as two bfloat16 pieces, so that tensor cores multiply them at 16-bit speed.

high = x rounded to 8 bits of mantissa, low = (x - high) rounded likewise: x = high + low but for
2^-17 of x, at float32's range. A product of two split factors is high * high + high * low + low *
high, without 2^-18 of it. A float16 value is exactly two pieces, a bfloat16 value one.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ikbo_tree.kernels.common.triton_launch import ceil_div, launch
from ikbo_tree.kernels.common.triton_lib import INTERPRETED, guard

_BLOCK = 2048
# The interpreter computes bfloat16 wrongly; float32 holds the same values.
_PIECE = torch.float32 if INTERPRETED else torch.bfloat16


def split(x: Tensor) -> Tensor:
    """[2, *x.shape] bfloat16, the high and the low piece of a float32 or float16 tensor.

    NaN and infinities are in the high piece alone, so they spread no further than in `x`.
    """
    x = x.contiguous()
    out = torch.empty((2, *x.shape), dtype=_PIECE, device=x.device)
    n = x.numel()
    if n:
        with guard(x):
            grid = (ceil_div(n, _BLOCK),)
            launch(_split_kernel, grid, x, out, n, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize=["n"])
def _split_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # Beyond this, rounding may end at infinity. NaN compares false.
    splits = tl.abs(x) < 3.38e38
    high = tl.where(splits, rounded, x)
    low = tl.where(splits, x - rounded, 0.0)
    tl.store(out_ptr + offs, high.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + n + offs, low.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def pieces_of(product, A_PIECES: tl.constexpr, B_PIECES: tl.constexpr):
    """Which piece of A and which of B the product of that number multiplies."""
    if A_PIECES == 2:
        if B_PIECES == 2:
            return product // 2, product % 2
        return product, product * 0
    return product * 0, product
