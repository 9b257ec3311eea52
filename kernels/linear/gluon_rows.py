"""Partial results, by rows, in the order in which a warpgroup holds its accumulators.

A partial result [rows, columns] is written and read by warpgroups that hold [64, columns] float32
accumulators, and by nobody else. A thread holds 2 neighbouring columns of every 8. So the columns
of a row are kept in an order in which what a thread holds of a *group* is 16 bytes, and what the
four threads of a row hold is 64 bytes in a line:

    offset in elements = 4 * VEC * group + VEC * t + element        t = lane % 4
    row = 16 * warp + 8 * h + lane // 4                             column = 8 * j + 2 * t + e

with VEC = 4 float32 or 8 16-bit elements of a thread in a group of 4 * VEC columns, and
j = group * VEC / 2 + element // 2, e = element % 2. Any row of a partial can be added to any row of
a tile: no shared memory, no change of layout, whole sectors.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.common.gluon_fragments import accumulator_layout


@gluon.constexpr_function
def rows_layout(columns: int, vec: int) -> Any:
    """[4 warps, 2 of h, 8 lanes, groups, 4 lanes, vec]: a thread has all groups of two rows."""
    groups = columns // (4 * vec)
    registers = [[0, 0, 0, 0, 0, 1 << bit] for bit in range(vec.bit_length() - 1)]
    registers += [[0, 0, 0, 1 << bit, 0, 0] for bit in range(groups.bit_length() - 1)]
    registers += [[0, 1, 0, 0, 0, 0]]
    lanes = [[0, 0, 0, 0, 1 << bit, 0] for bit in range(2)]
    lanes += [[0, 0, 1 << bit, 0, 0, 0] for bit in range(3)]
    warps = [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, 2, 8, groups, 4, vec])


@gluon.constexpr_function
def _along(dim: int, columns: int, vec: int) -> Any:
    """Layout of one dimension of the six."""
    layout = rows_layout(columns, vec)
    for other in (5, 4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _rows(COLUMNS: gl.constexpr, VEC: gl.constexpr):
    """Row of the tile of each element, [4, 2, 8, 1, 1, 1]."""
    warp = gl.arange(0, 4, _along(0, COLUMNS, VEC))[:, None, None, None, None, None]
    h = gl.arange(0, 2, _along(1, COLUMNS, VEC))[None, :, None, None, None, None]
    lane = gl.arange(0, 8, _along(2, COLUMNS, VEC))[None, None, :, None, None, None]
    return warp * 16 + h * 8 + lane


@gluon.jit
def _places(COLUMNS: gl.constexpr, VEC: gl.constexpr):
    """Offset of each element from its row's first, [1, 1, 1, groups, 4, VEC]."""
    GROUPS: gl.constexpr = COLUMNS // (4 * VEC)
    group = gl.arange(0, GROUPS, _along(3, COLUMNS, VEC))[None, None, None, :, None, None]
    t = gl.arange(0, 4, _along(4, COLUMNS, VEC))[None, None, None, None, :, None]
    element = gl.arange(0, VEC, _along(5, COLUMNS, VEC))[None, None, None, None, None, :]
    return (group * 4 + t) * VEC + element


@gluon.jit
def load_rows(
    partial_ptr, index_ptr, mapped, base, row, live, wanted, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr, PITCH: gl.constexpr,
):  # fmt: skip
    """[64, COLUMNS] in the accumulators' layout: a row of a partial for each row of a tile.

    Args:
        partial_ptr: the partials' first row, at the tile's first column.
        index_ptr: map [rows] int32 from the tile's level to the partial's.
        mapped: whether there is one; otherwise each row has its own.
        base: the partial's first row.
        row: the tile's first row.
        live: rows of the tile's level. Of the others nothing is read.
        wanted: whether to load; all that is not loaded is -0.0, which changes nothing that it is
            added to.
        FIRST: first column, a multiple of a group's.
        COLUMNS: how many.
        PITCH: elements from row to row.
    """
    VEC: gl.constexpr = 128 // partial_ptr.dtype.element_ty.primitive_bitwidth
    rows = row + _rows(COLUMNS, VEC)
    inside = (rows < live) & wanted
    found = gl.load(index_ptr + rows, mask=inside & mapped, other=0)
    parents = gl.where(mapped, found, rows) + base
    pointers = partial_ptr + parents.to(gl.int64) * PITCH + (_places(COLUMNS, VEC) + FIRST)
    # Triton takes the literal -0.0 for 0.0.
    if VEC == 4:
        nothing = gl.to_tensor(-(2**31)).to(gl.float32, bitcast=True)
    else:
        kind: gl.constexpr = partial_ptr.dtype.element_ty
        nothing = gl.to_tensor(-(2**15)).to(gl.int16).to(kind, bitcast=True)
    x = gl.load(pointers, mask=inside, other=nothing)
    # warp, h, lane // 4, group, t, j within the group, e
    x = x.reshape([4, 2, 8, COLUMNS // (4 * VEC), 4, VEC // 2, 2]).permute([0, 1, 2, 3, 5, 4, 6])
    x = x.reshape([64, COLUMNS])
    return gl.convert_layout(x, accumulator_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def store_rows(partial_ptr, x, row, rows, FIRST: gl.constexpr, PITCH: gl.constexpr):
    """Stores [64, columns] as the rows of a partial, rounded to its dtype.

    Args:
        partial_ptr: the partials' first row, at the tile's first column.
        x: in the accumulators' layout.
        row: where its first row goes.
        rows: how many rows to store.
        FIRST: first column, a multiple of a group's.
        PITCH: elements from row to row.
    """
    VEC: gl.constexpr = 128 // partial_ptr.dtype.element_ty.primitive_bitwidth
    COLUMNS: gl.constexpr = x.shape[1]
    mine = _rows(COLUMNS, VEC)
    pointers = partial_ptr + (row + mine).to(gl.int64) * PITCH + (_places(COLUMNS, VEC) + FIRST)
    GROUPS: gl.constexpr = COLUMNS // (4 * VEC)
    x = x.to(partial_ptr.dtype.element_ty)
    x = x.reshape([4, 2, 8, GROUPS, VEC // 2, 4, 2]).permute([0, 1, 2, 3, 5, 4, 6])
    x = x.reshape([4, 2, 8, GROUPS, 4, VEC])
    x = gl.convert_layout(x, rows_layout(COLUMNS, VEC), assert_trivial=True)
    gl.store(pointers, x, mask=mine < rows)
