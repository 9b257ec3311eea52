"""Device code that the attention kernels share: whose keys, which query rows, one block of keys.

A *memory* travels to a kernel as a tuple, in this order (None where it has no such thing):

    k, v, bias, mask   pointers; bias and mask are contiguous
    extent             lengths of a padded memory, offsets of a packed one
    index, offsets     the route's, for a memory whose row is not the tile's segment
    k_row, k_pos, k_head, v_row, v_pos, v_head   strides; k_row is None in a packed memory
    bias_pos, bias_head                          strides

and beside it `size`: S of a padded memory, the number of entries of a packed one. The keys that one
row of it owns, for one head, travel on as the tuple that `locate` returns.

Scores are kept in units of log2, so that exp2 needs no multiplication: `scale2` is scale * log2(e).
"""

# Kernel functions take pointers, tiles and constexprs, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ikbo_tree.kernels.common.triton_lib import rows_at

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def key_span(extent_ptr, size, row, PACKED: tl.constexpr):
    """First entry and number of keys of a row, both clamped to what exists: int64, int32."""
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
def locate(memory, size, row, kv_head):
    """The keys that a row of a memory owns: how many, their first entry, and pointers for one head.

    Returns:
        Pointers at the first key and value, the number of keys, and the entry of the first one,
        counted over the whole memory, at which bias and mask begin.
    """
    row = row.to(tl.int64)
    start, length = key_span(memory[4], size, row, memory[7] is None)
    k_ptr = memory[0] + kv_head.to(tl.int64) * memory[9]
    v_ptr = memory[1] + kv_head.to(tl.int64) * memory[12]
    if memory[7] is None:
        k_ptr += start * memory[8]
        v_ptr += start * memory[11]
    else:
        k_ptr += row * memory[7]
        v_ptr += row * memory[10]
    return k_ptr, v_ptr, length, start


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
def store_rows(ptr, stride, at, valid, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Writes where `load_rows` reads, in the pointer's dtype."""
    columns = tl.arange(0, PADDED)
    ptrs = ptr + at.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = valid[:, None]
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def flat_rows(order_ptr, begin, steps, valid, n_seed):
    """Folded rows in the query tensor's own order, int64, of positions in a segment.

    Args:
        order_ptr: rows by position, or None where they are the same.
        begin: the segment's first position.
        steps: [rows] int32, folded rows counted from there.
        valid: [rows]; others give row 0's.
        n_seed: folded rows a row.
    """
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
def first_state(M: tl.constexpr, W: tl.constexpr):
    """The softmax over nothing: maximum, sum and weighted sum of values."""
    peak = tl.full((M,), NOTHING, tl.float32)
    return peak, tl.zeros((M,), tl.float32), tl.zeros((M, W), tl.float32)


@triton.jit
def merge_states(peak_a, sum_a, acc_a, peak_b, sum_b, acc_b):
    """The softmax over two sets of keys, `a` the earlier; twice nothing is nothing.

    Written so that every compiler rounds alike: no product here can be fused with another sum.
    """
    peak = tl.maximum(peak_a, peak_b)
    finite = tl.where(peak == NOTHING, 0.0, peak)
    weight_a = tl.exp2(peak_a - finite)
    weight_b = tl.exp2(peak_b - finite)
    total = tl.fma(sum_b, weight_b, sum_a * weight_a)
    acc_a = acc_a * weight_a[:, None]
    acc = tl.fma(acc_b, tl.broadcast_to(weight_b[:, None], acc_b.shape), acc_a)
    return peak, total, acc


@triton.jit
def finish(peak, total, acc):
    """Output and log-sum-exp (natural) of a state; over nothing 0 and -inf."""
    empty = total == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, total)
    lse = tl.where(empty, NOTHING, (peak + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    return acc * inverse[:, None], lse
