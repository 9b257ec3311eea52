"""Device code that the attention kernels share: whose keys, and which query rows.

A *memory* travels to a kernel as a tuple, in this order (None where it has no such thing):

    0-3    k, v, bias, mask        pointers; bias and mask are contiguous
    4-6    k_row, k_pos, k_head    strides; k_row is None in a packed memory
    7-9    v_row, v_pos, v_head
    10-11  bias_pos, bias_head
    12     how many heads of the queries share one of the keys

Beside it come, as arguments of their own, since Triton would compile a kernel for each alignment of
a map and each kind of number in a tuple:

    extent     lengths of a padded memory, offsets of a packed one
    index      the route's; None where a memory's row is the segment of the tile
    border     the route's offsets, likewise
    size       S of a padded memory, the number of entries of a packed one

An *entry* is a key's place among all of a memory's: row * S + key, or the place itself in a packed
one.
"""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import live_rows, rows_at
from ikbo_tree.kernels.common.triton_tiles import find_tile

COUNTS = [
    *("rows", "segments", "owners", "n_seed", "entries", "items", "slots", "splits"),
    *("size", "size0", "size1", "size2", "size3", "own_programs", "stats_pitch"),
]
"""Arguments of all kernels that follow from row counts: nothing is compiled for their values."""
MAPS = [
    *("order_ptr", "offsets_ptr", "live_ptr", "own_live_ptr", "owners_live_ptr", "extent_ptr"),
    *(f"{name}{i}" for name in ("extent", "index", "border") for i in range(4)),
]
"""Maps lie anywhere in a tree's buffer: nothing is compiled for their alignment."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def key_span(extent_ptr, size, row, PACKED: tl.constexpr):
    """First entry (int64) and number of keys (int32) of a row, clamped to what exists."""
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(extent_ptr + row).to(tl.int64), 0), size)
        stop = tl.minimum(tl.maximum(tl.load(extent_ptr + row + 1).to(tl.int64), 0), size)
        length = tl.maximum(stop - start, 0)
    else:
        start = row.to(tl.int64) * size
        length = start * 0 + size
        if extent_ptr is not None:
            length = tl.minimum(tl.maximum(tl.load(extent_ptr + row).to(tl.int64), 0), size)
    return start, length.to(tl.int32)


@triton.jit
def locate(memory, extent_ptr, size, row, kv_head):
    """The keys that a row of a memory owns.

    Returns:
        Pointers at the first key and value of one head, the number of keys, the first one's entry.
    """
    row = row.to(tl.int64)
    start, length = key_span(extent_ptr, size, row, memory[4] is None)
    k_ptr = memory[0] + kv_head.to(tl.int64) * memory[6]
    v_ptr = memory[1] + kv_head.to(tl.int64) * memory[9]
    if memory[4] is None:
        k_ptr += start * memory[5]
        v_ptr += start * memory[8]
    else:
        k_ptr += row * memory[4]
        v_ptr += row * memory[7]
    return k_ptr, v_ptr, length, start


@triton.jit
def find_rows(offsets_ptr, live_ptr, segments, rows, tile, n_seed, T: tl.constexpr):
    """The query rows of a tile.

    Where `offsets_ptr` is None every row is a segment, and the tiles of one follow each other.

    Returns:
        The segment (`segments` for dead rows), the segment's first position, the tile's first
        folded row and the segment's end, both counted from there: nothing where first >= end.
    """
    if offsets_ptr is None:
        each = tl.cdiv(n_seed, T)
        begin = tile // each
        segment = tl.where(begin < live_rows(live_ptr, rows), begin, segments)
        first = (tile - begin * each) * T
        end = n_seed
    else:
        segment, at, stop = find_tile(offsets_ptr, segments, rows, tile, n_seed, T)
        begin = tl.load(offsets_ptr + segment)
        base = begin.to(tl.int64) * n_seed
        first = (at - base).to(tl.int32)
        end = (stop - base).to(tl.int32)
    return segment, begin, first, end


@triton.jit
def flat_rows(order_ptr, begin, steps, valid, n_seed):
    """Folded rows in the query tensor's own order, int64, of positions in a segment.

    Args:
        order_ptr: rows by position, or None where they are the same.
        begin: the segment's first position.
        steps: [rows] int32, folded rows counted from there.
        valid: [rows]; the others give 0. None: all are.
        n_seed: folded rows a row.
    """
    if valid is None:
        valid = steps >= 0
    if order_ptr is None:
        flat = tl.where(valid, begin.to(tl.int64) * n_seed + steps, 0)
    else:
        rows = rows_at(order_ptr, begin + steps // n_seed, valid)
        flat = rows * n_seed + tl.where(valid, steps % n_seed, 0)
    return flat


@triton.jit
def flat_offsets(flat, n_seed, row_stride, seed_stride, FOLDED: tl.constexpr):
    """Where folded rows lie in a tensor [rows, n_seed, ...]; FOLDED: one stride does."""
    if FOLDED:
        offsets = flat * seed_stride
    else:
        offsets = (flat // n_seed) * row_stride + (flat % n_seed) * seed_stride
    return offsets


@triton.jit
def load_rows(ptr, stride, at, valid, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] elements `ptr[at * stride + column]`; zeros beyond WIDTH and where not valid.

    Args:
        ptr: scalar pointer.
        stride: of a row.
        at: [rows].
        valid: [rows], or None: all are.
        WIDTH: columns that exist.
        PADDED: a power of two, at least WIDTH.
    """
    columns = tl.arange(0, PADDED)
    ptrs = ptr + at.to(tl.int64)[:, None] * stride + columns[None, :]
    if valid is None and WIDTH == PADDED:
        x = tl.load(ptrs)
    elif valid is None:
        x = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        x = tl.load(ptrs, mask=valid[:, None], other=0.0)
    else:
        x = tl.load(ptrs, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def load_queries(
    q_ptr,
    flat,
    valid,
    n_seed,
    q_row,
    q_seed,
    NEGATIVE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """[M, DP] queries of folded rows, with their sign changed if NEGATIVE."""
    q = load_rows(q_ptr, 1, flat_offsets(flat, n_seed, q_row, q_seed, False), valid, D, DP)
    if NEGATIVE:
        q = -q
    return q


@triton.jit
def store_rows(ptr, stride, at, valid, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Writes where `load_rows` reads, in the pointer's dtype."""
    columns = tl.arange(0, PADDED)
    ptrs = ptr + at.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = valid[:, None]
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def key_bias(memory, start, head, steps, valid):
    """[keys] float32 in units of log2: a memory's bias of keys that one row owns; None without."""
    bias = None
    if memory[2] is not None:
        ptrs = memory[2] + (start + steps) * memory[10] + head * memory[11]
        if valid is None:
            bias = tl.load(ptrs).to(tl.float32) * LOG2E
        else:
            bias = tl.load(ptrs, mask=valid, other=0.0).to(tl.float32) * LOG2E
    return bias


@triton.jit
def seen_keys(memory, start, steps, valid):
    """`valid` [keys] without the keys that a memory's mask leaves out."""
    if memory[3] is not None:
        if valid is None:
            valid = tl.load(memory[3] + start + steps) != 0
        else:
            valid = tl.load(memory[3] + start + steps, mask=valid, other=0) != 0
    return valid


@triton.jit
def full_block(
    memory,
    desc,
    ptr,
    start,
    at,
    kv_head,
    POS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
):
    """[N, PADDED] keys or values `at ... at + N - 1` of a row, none of which is left out.

    POS, HEAD: where their strides are in `memory`.
    """
    if desc is None:
        x = load_rows(ptr, memory[POS], at + tl.arange(0, N), None, WIDTH, PADDED)
    else:
        x = desc.load([(start + at).to(tl.int32), (kv_head * memory[HEAD]).to(tl.int32)])
    return x
