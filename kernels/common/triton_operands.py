"""From tensors of any strides to what matrix kernels take: descriptors, or pointers and strides.

Descriptors (the tensor memory accelerator of Hopper and later) want 16-byte aligned rows. Weights,
small and read by every program, are copied to such rows where they have none: a column count that
is no multiple of 8 is usual for them. Nothing else is copied, unless no dimension is contiguous.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ikbo_tree.kernels.common.gemm_forms import Operand
from ikbo_tree.kernels.common.triton_launch import described
from ikbo_tree.kernels.common.triton_lib import alignment

_ROW_BYTES = 16
_STRIDE_LIMIT = 2**40


@dataclass(frozen=True)
class Matrices:
    """Matrices [rows, columns] of one operand, stacked by piece and batch.

    Attributes:
        data: [pieces, batch, rows, columns], one of the last two dimensions contiguous.
        form: what the kernel is compiled for.
        extent: elements that may be read along the contiguous dimension.
        piece: the stride of the pieces divided by the rows of the tree in `data`.
        batch: the stride of the batch; 0 where it is a batch of one in any call.
    """

    data: Tensor
    form: Operand
    extent: int
    piece: int
    batch: int

    @property
    def wide(self) -> bool:
        """Whether all accesses may have 16 bytes."""
        return self.form.descriptor or self.form.unit * self.data.element_size() >= _ROW_BYTES

    @property
    def _outer(self) -> int:
        return self.data.stride(3 if self.form.transposed else 2)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """`piece`, `batch`, outer stride and extent, divided by the form's unit."""
        if self.form.descriptor:
            return 0, 0, 0, 0
        unit = self.form.unit
        return self.piece // unit, self.batch // unit, self._outer // unit, self.extent // unit

    def argument(self, rows: int, columns: int) -> Any:
        """The pointer, or a descriptor for tiles of that size."""
        if not self.form.descriptor:
            return self.data
        pieces, batch, height, width = self.data.shape
        if self.form.transposed:
            height, width, rows, columns = width, height, columns, rows
        strides = [self.data.stride(1), self._outer, 1]
        return described(self.data, [pieces * batch, height, width], strides, [1, rows, columns])


def matrices(
    data: Tensor,
    *,
    descriptors: bool,
    batched: bool = False,
    rows: int = 1,
    extent: int | None = None,
) -> Matrices:
    """Describes an operand.

    Args:
        data: [pieces, batch, rows, columns], any strides; several pieces lie one after the other.
        rows: rows of the tree in it, so that no stride is passed on that depends on them.
        descriptors: whether the kernel may take a descriptor.
        batched: the rows of the tree are the batch.
        extent: elements that may be read along the contiguous dimension, at least its size; beyond
            the size they are zero.
    """
    data, transposed = _contiguous_dimension(data)
    inner, outer = (2, 3) if transposed else (3, 2)
    sizes = data.shape
    extent = sizes[inner] if extent is None else extent
    # What a dimension of one entry has for a stride is of no use to anybody.
    steps = [data.stride(d) if sizes[d] > 1 else 0 for d in (0, 1, outer)]
    piece = steps[0] // max(rows, 1)
    if descriptors and _describable(data, steps, outer):
        form = _operand(sizes[0], transposed, True, 1)
    else:
        form = _operand(sizes[0], transposed, False, alignment(extent, piece, *steps))
    return Matrices(data, form, extent, piece, data.stride(1) if batched else 0)


_operand = functools.cache(Operand)


def _contiguous_dimension(data: Tensor) -> tuple[Tensor, bool]:
    """`data`, or a copy, and whether rows are the contiguous dimension rather than columns."""
    sizes, strides = data.shape, data.stride()
    for dim in (3, 2):
        if strides[dim] == 1:
            return data, dim == 2
    for dim in (3, 2):
        if sizes[dim] == 1:
            return data, dim == 2
    return data.contiguous(), False


def _describable(data: Tensor, steps: list[int], outer: int) -> bool:
    if data.element_size() != 2 or data.data_ptr() % _ROW_BYTES:
        return False
    sizes = data.shape
    if sizes[0] > 1 and steps[0] != sizes[1] * data.stride(1):
        return False
    for dim in (1, outer):
        step = data.stride(dim) * data.element_size()
        if step % _ROW_BYTES or not 0 < step < _STRIDE_LIMIT:
            return False
    return True


def storable(out: Tensor) -> bool:
    """Whether a kernel can store to `out`, contiguous, through a descriptor."""
    return out.shape[-1] * out.element_size() % _ROW_BYTES == 0 == out.data_ptr() % _ROW_BYTES


def store_argument(out: Tensor, rows: int, columns: int) -> Any:
    """A descriptor for stores of tiles of that size to `out` [batch, M, N], contiguous."""
    return described(out, list(out.shape), list(out.stride()), [1, rows, columns])


def weight_matrices(weight: Tensor, *, descriptors: bool, transposed: bool) -> Matrices:
    """A weight as operand, copied to aligned rows where it has none.

    Args:
        weight: [height, width], or [pieces, height, width].
        descriptors: whether the kernel may take a descriptor.
        transposed: the operand is [width, height].
    """
    stacked = weight if weight.dim() == 3 else weight[None]
    extent = stacked.shape[2]
    unit = _ROW_BYTES // stacked.element_size()
    steps = (stacked.stride(1), stacked.stride(0) if len(stacked) > 1 else 0)
    if stacked.stride(2) != 1 or any(step % unit for step in steps):
        stacked, extent = _on_aligned_rows(stacked, descriptors), -(-extent // 16) * 16
    data = stacked[:, None]
    return matrices(data.mT if transposed else data, descriptors=descriptors, extent=extent)


def _on_aligned_rows(weight: Tensor, descriptors: bool) -> Tensor:
    """A copy in rows of a multiple of 16 elements, zero beyond the last where those are read."""
    width = weight.shape[2]
    shape = (*weight.shape[:2], -(-width // 16) * 16)
    beyond_is_read = not descriptors or weight.element_size() != 2
    padded = weight.new_zeros(shape) if beyond_is_read else weight.new_empty(shape)
    aligned = padded[..., :width]
    aligned.copy_(weight)
    return aligned
