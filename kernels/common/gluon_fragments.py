"""Tiles in memory in the order in which a warpgroup holds its accumulators.

A partial result is written and read by warpgroups that hold [64, columns] float32 accumulators, and
by nobody else. So it is kept in *fragment order*: a thread stores its own registers in pieces of 16
bytes, neighbouring lanes side by side, and another one loads them into its registers. No shared
memory, no change of layout, whole lines.

    offset in elements = ((warp * PIECES + piece) * 32 + lane) * VEC + element
    row = 16 * warp + 8 * h + lane // 4        column = 8 * j + 2 * (lane % 4) + e

with VEC = 4 float32 or 8 16-bit elements a piece, j = piece, element = (h, e) in float32 and
j = 2 * piece + element // 4, element = (j % 2, h, e) in 16 bits, and PIECES = columns / (2 VEC)
those of the whole tile. Warp w has rows 16 w .. 16 w + 15, so a tile with fewer rows is the
beginning of a whole one, in multiples of 16 rows.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def accumulator_layout(columns: int) -> Any:
    """Of [64, columns] float32 in a warpgroup."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def fragment_layout(columns: int, vec: int) -> Any:
    """[4 warps, pieces, 32 lanes, vec]: a thread has all elements of all its pieces."""
    pieces = columns // (2 * vec)
    registers = [[0, 0, 0, 1 << bit] for bit in range(vec.bit_length() - 1)]
    registers += [[0, 1 << bit, 0, 0] for bit in range(pieces.bit_length() - 1)]
    lanes = [[0, 0, 1 << bit, 0] for bit in range(5)]
    warps = [[1, 0, 0, 0], [2, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4, pieces, 32, vec])


@gluon.constexpr_function
def _along(dim: int, columns: int, vec: int) -> Any:
    """Layout of one dimension of the fragment's four."""
    layout = fragment_layout(columns, vec)
    for other in (3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _pieces(
    base, rows, COLUMNS: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr, VEC: gl.constexpr
):  # fmt: skip
    """Pointers to the pieces of columns FIRST .. FIRST + COLUMNS of a tile WIDTH columns wide.

    And which of them lie in the first `rows` rows, rounded up to 16. A thread's pieces lie at
    constant distances from one pointer.
    """
    MINE: gl.constexpr = COLUMNS // (2 * VEC)
    ALL: gl.constexpr = WIDTH // (2 * VEC)
    SKIPPED: gl.constexpr = FIRST // (2 * VEC)
    warp = gl.arange(0, 4, _along(0, COLUMNS, VEC))[:, None, None, None]
    piece = gl.arange(0, MINE, _along(1, COLUMNS, VEC))[None, :, None, None]
    lane = gl.arange(0, 32, _along(2, COLUMNS, VEC))[None, None, :, None]
    element = gl.arange(0, VEC, _along(3, COLUMNS, VEC))[None, None, None, :]
    thread = base + (warp * ALL * 32 + lane) * VEC
    pointers = thread + ((SKIPPED + piece) * 32 * VEC + element)
    return pointers, warp * 16 < rows


@gluon.jit
def load_fragment(
    base, wanted, rows, COLUMNS: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr
):
    """[64, COLUMNS] of a tile in memory, in the accumulators' layout.

    Args:
        base: pointer to the tile.
        wanted: whether to load; else all is -0.0, which changes nothing that it is added to.
        rows: of the tile. The others, up to a multiple of 16, are what was stored there; -0.0
            beyond.
        COLUMNS: how many to load, a power of two from 16 on.
        FIRST: the first of them.
        WIDTH: columns of the tile.
    """
    VEC: gl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    pointers, inside = _pieces(base, rows, COLUMNS, FIRST, WIDTH, VEC)
    # Triton takes the literal -0.0 for 0.0.
    if VEC == 4:
        nothing = gl.to_tensor(-(2**31)).to(gl.float32, bitcast=True)
    else:
        nothing = gl.to_tensor(-(2**15)).to(gl.int16).to(base.dtype.element_ty, bitcast=True)
    x = gl.load(pointers, mask=inside & wanted, other=nothing)
    if VEC == 4:  # warp, j, g, t, h, e
        x = x.reshape([4, COLUMNS // 8, 8, 4, 2, 2]).permute([0, 4, 2, 1, 3, 5])
    else:  # warp, j // 2, g, t, j % 2, h, e
        x = x.reshape([4, COLUMNS // 16, 8, 4, 2, 2, 2]).permute([0, 5, 2, 1, 4, 3, 6])
    x = x.reshape([64, COLUMNS])
    return gl.convert_layout(x, accumulator_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def store_fragment(
    base, x, rows, COLUMNS: gl.constexpr, FIRST: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """Stores what `load_fragment` loads, rounded to the dtype of the tile in memory."""
    VEC: gl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    pointers, inside = _pieces(base, rows, COLUMNS, FIRST, WIDTH, VEC)
    x = x.to(base.dtype.element_ty)
    if VEC == 4:
        x = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    else:
        x = x.reshape([4, 2, 8, COLUMNS // 16, 2, 4, 2]).permute([0, 3, 2, 5, 4, 1, 6])
    x = x.reshape([4, COLUMNS // (2 * VEC), 32, VEC])
    x = gl.convert_layout(x, fragment_layout(COLUMNS, VEC), assert_trivial=True)
    gl.store(pointers, x, mask=inside)


@gluon.jit
def halves(x, COLUMNS: gl.constexpr):
    """Left and right half of the columns of accumulators: registers are renamed."""
    left, right = x.reshape([64, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
    return (
        gl.convert_layout(left, accumulator_layout(COLUMNS // 2), assert_trivial=True),
        gl.convert_layout(right, accumulator_layout(COLUMNS // 2), assert_trivial=True),
    )
