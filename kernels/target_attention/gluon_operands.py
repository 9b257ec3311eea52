"""What Hopper kernels of attention get from the host: descriptors for TMA, and counters."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ikbo_tree.kernels.common.gemm_forms import power_of_two
from ikbo_tree.kernels.common.gluon_lib import described
from ikbo_tree.kernels.target_attention.triton_groups import dense

TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def rows_descriptor(x: Tensor) -> TensorDescriptor:
    """[rows, n, H, D], rows and n of one stride, as [rows * n, H, D]; boxes of 64 of one head."""
    n, pitch = _folded(x)
    return _descriptor(x, (n, *x.shape[2:]), (pitch, *x.stride()[2:]), (64, 1))


def blocks_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """The same as [1, rows * n, H, D], like `keys_descriptor`'s; boxes of `rows` of one head."""
    x = aligned(x)
    n, pitch = _folded(x)
    return _descriptor(x, (1, n, *x.shape[2:]), (n * pitch, pitch, *x.stride()[2:]), (1, rows, 1))


def keys_descriptor(x: Tensor, keys: int) -> TensorDescriptor:
    """[..., S, Hkv, D] as [rows, S, Hkv, D], with boxes of so many keys of one row and head."""
    x = aligned(x if x.dim() == 4 else x[None])
    return _descriptor(x, tuple(x.shape), x.stride(), (1, keys, 1))


def _folded(x: Tensor) -> tuple[int, int]:
    """How many folded rows there are, and their stride."""
    return x.shape[0] * x.shape[1], x.stride(0) if x.shape[1] == 1 else x.stride(1)


def _descriptor(
    x: Tensor, shape: tuple[int, ...], strides: Sequence[int], box: tuple[int, ...]
) -> TensorDescriptor:
    width = shape[-1]
    # A dim of one entry may have any stride; TMA wants multiples of 16 bytes.
    strides = [width if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    strides[-1] = 1
    if x.numel() == 0:
        # Never read; but a descriptor must have something.
        x, shape = x.new_empty((1, width)), (*[1] * len(box), width)
        strides = [*[width] * len(box), 1]
    block = (*box, power_of_two(width))
    return described(x, list(shape), strides, list(block), _layout(block, x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])


def aligned(x: Tensor) -> Tensor:
    """`x` as TMA can fetch it: dense rows a multiple of 16 bytes apart; itself where it is."""
    x = dense(x)
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    fits = all(stride % unit == 0 and stride > 0 for stride in strides)
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """[2] int32 zeros that no launch at the same time uses; a launch leaves them zero.

    Launches of one stream follow each other and share them. A graph may run on any stream, so what
    is captured has its own, which the graph clears.
    """
    if device.type != "cuda":
        return torch.zeros(2, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _COUNTERS[key]
