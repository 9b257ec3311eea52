"""The scheduler of the Hopper gradient kernel of keys and values: one warp that finds work."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ikbo_tree.kernels.target_attention.gluon_boards import leave, next_item, tell
from ikbo_tree.kernels.target_attention.gluon_keys_device import (
    ADDS,
    BLOCK,
    ENDS,
    HEAD,
    KEY,
    KEYS,
    KEYS_TILE,
    OWNER,
    ROW,
    ROWS,
    SLOT,
    STEPS,
)
from ikbo_tree.kernels.target_attention.gluon_rows import LANES, key_span


@gluon.jit
def _last_at_most(offsets_ptr, count, value, T: gl.constexpr, EACH: gl.constexpr):
    """The largest i < count with `offsets[i] // T + i * EACH <= value`: see triton_tiles."""
    low = 0
    left = count
    while left > 1:
        step = gl.cdiv(left, 32)
        place = gl.arange(0, 32, LANES) * step
        inside = place < left
        offsets = gl.load(offsets_ptr + low + place, mask=inside, other=0)
        passed = gl.sum((inside & (offsets // T + (low + place) * EACH <= value)).to(gl.int32), 0)
        below = gl.maximum(passed - 1, 0) * step
        low += below
        left = gl.minimum(step, left - below)
    return low


@gluon.jit
def _find_keys(memory, tree, tile, PACKED: gl.constexpr):
    """Which keys a tile has: `find_keys` of the Triton path.

    Returns:
        The row that owns them (`owners`: nobody), and the first one's number there.
    """
    extent_ptr, size, owners = memory
    offsets_ptr, live_ptr, rows, _ = tree
    if PACKED:
        if offsets_ptr is not None:
            # Extents of dead rows may be anything; those behind the last with rows are idle.
            last = gl.load(offsets_ptr + owners) - 1
            known = gl.where(last < 0, 0, _last_at_most(offsets_ptr, owners, last, 1, 0) + 1)
        elif live_ptr is not None:
            known = gl.minimum(gl.load(live_ptr), owners)
        else:
            known = gl.minimum(rows, owners)
        owner = _last_at_most(extent_ptr, known + 1, tile, KEYS_TILE, 1)
        begin = gl.load(extent_ptr + owner).to(gl.int64)
        low = (tile - (begin // KEYS_TILE + owner)) * KEYS_TILE
        owner = gl.where((owner < known) & (low >= 0), owner, owners)
    else:
        each = gl.cdiv(size, KEYS_TILE)
        owner = tile // each
        low = (tile - owner * each).to(gl.int64) * KEYS_TILE
    return owner, low.to(gl.int32)


@gluon.jit
def _find_queries(tree, owner):
    """First row and number of folded query rows of a segment."""
    offsets_ptr, live_ptr, rows, n_seed = tree
    if offsets_ptr is None:
        begin = owner
        live = rows if live_ptr is None else gl.load(live_ptr)
        count = gl.where(owner < live, n_seed, 0)
    else:
        begin = gl.load(offsets_ptr + owner)
        count = (gl.load(offsets_ptr + owner + 1) - begin) * n_seed
    return begin * n_seed, count


@gluon.jit
def scheduler(
    board,
    told,
    kv_empty,
    counter_ptr,
    tree,
    memory,
    n_items,
    splits,
    SHARED: gl.constexpr,
    HKV: gl.constexpr,
    PACKED: gl.constexpr,
    PIECE: gl.constexpr,
    PIECES: gl.constexpr,
):
    """Hands one work after another to the other roles.

    With splits = 1 item w is head w % HKV of tile w // HKV, and its pieces are the block's, one
    after another. Otherwise splits = PIECES, and item w is piece w % PIECES of item w // PIECES,
    which leaves its sums in a slot of its own.

    Args are as in `key_gradients`; tree: (offsets, live, rows, n_seed) of the memory's route;
    memory: (extent, size, owners).
    """
    extent_ptr, size, owners = memory
    lane = gl.arange(0, 32, LANES)
    n = 0
    item = gl.program_id(0)
    while item < n_items:
        number = item // splits
        turn = item % splits
        head = number % HKV
        owner, low = _find_keys(memory, tree, number // HKV, PACKED)
        if owner < owners:
            row, count = _find_queries(tree, owner)
            owner_row, start, length = key_span(extent_ptr, size, owner, PACKED)
            keys = gl.where(count > 0, gl.minimum(length - low, KEYS_TILE), 0)
            keys = gl.maximum(keys, 0)
            # Zeros come out of a block of no rows.
            count = gl.where(keys > 0, count, 0)
            each = gl.cdiv(gl.cdiv(count, PIECES), BLOCK) * BLOCK
            each = gl.where(count > PIECE, gl.maximum(each, PIECE), gl.maximum(count, 1))
            pieces = gl.maximum(gl.cdiv(count, each), 1)
            if PACKED:
                pieces = gl.where(keys > 0, pieces, 0)
            for piece in range(turn, pieces, splits):
                rows = gl.minimum(each, count - piece * each)
                slot = gl.where(splits == 1, gl.program_id(0), number * PIECES + piece)
                ends = (splits == 1) & (piece == pieces - 1)
                adds = (splits == 1) & (piece > 0)
                words = gl.where(lane == STEPS, gl.maximum(gl.cdiv(rows, BLOCK), 1) * SHARED, 0)
                words = gl.where(lane == ROW, row + piece * each, words)
                words = gl.where(lane == ROWS, rows, words)
                words = gl.where(lane == HEAD, head, words)
                words = gl.where(lane == OWNER, owner_row, words)
                words = gl.where(lane == KEY, start + low, words)
                words = gl.where(lane == KEYS, keys, words)
                words = gl.where(lane == SLOT, gl.where(pieces == 1, -1, slot), words)
                words = gl.where((lane == ADDS) & adds, 1, words)
                words = gl.where((lane == ENDS) & (ends | (pieces == 1)), 1, words)
                tell(board, told, kv_empty, n, words)
                n += 1
        item = next_item(counter_ptr)
    tell(board, told, kv_empty, n, gl.zeros((32,), gl.int32, LANES))
    leave(counter_ptr)
