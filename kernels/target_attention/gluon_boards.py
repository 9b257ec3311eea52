"""Device code that the roles of all Hopper attention kernels share: boards, counters, blocks."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ikbo_tree.kernels.common.gluon_lib import cta_sync
from ikbo_tree.kernels.target_attention.gluon_device import viewed

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
WORDS = gl.constexpr(32)
"""Words of a board, int32: what a lane of the scheduler each writes. There are two boards."""


@gluon.jit
def tell(board, told, free, n, words):
    """Writes the words of work number n, which readers of number n - 2 have left."""
    b = n % 2
    mbarrier.wait(free.index(b), ((n // 2) & 1) ^ 1)
    viewed(board, gl.int32, [2, WORDS], FLAT).index(b).store(words)
    cta_sync()
    mbarrier.arrive(told.index(b))


@gluon.jit
def word(board, b, which):
    """A word of board b, for every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(board.index(b * WORDS + which).load(layout), 0)


@gluon.jit
def next_item(counter_ptr):
    """The next item that no block has: the first ones are the blocks' own."""
    return gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def leave(counter_ptr):
    """The last block to come here leaves the counters as the next launch wants them."""
    left = gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel")
    if left == gl.num_programs(0) - 1:
        gl.atomic_xchg(counter_ptr, 0, sem="relaxed")
        gl.atomic_xchg(counter_ptr + 1, 0, sem="relaxed")


@gluon.jit
def _clear_eights(block, at, COUNT: gl.constexpr):
    """Zeros to pieces `at` to `at + COUNT - 1` of 1 KiB; `at` is a multiple of COUNT."""
    line: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    ALL: gl.constexpr = block.shape[1] * block.shape[3] // 512
    pieces = viewed(block, gl.int32, [ALL // COUNT, COUNT * 256], FLAT)
    pieces.index(at // COUNT).store(gl.zeros((COUNT * 256,), gl.int32, line))


@gluon.jit
def clear_behind(bufs, stage, high):
    """Zeros to the rows of a block behind the first `high`, which belong to nobody or to others.

    Their weights are 0, but 0 * NaN is NaN. Both consumers write the same. The swizzled layout has
    panels of 128 bytes of each row, and moves nothing out of a row: eight rows of a panel are 1 KiB
    in one piece.
    """
    EIGHTS: gl.constexpr = bufs.shape[2] // 8
    PANELS: gl.constexpr = bufs.shape[4] // 64
    square: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    piece: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    block = bufs.index(stage)
    if high % 8 != 0:
        kept = gl.arange(0, 8, gl.SliceLayout(1, piece)) < high % 8
        for panel in gl.static_range(PANELS):
            eights = viewed(block, gl.int32, [PANELS * EIGHTS, 8, 32], square)
            border = eights.index(panel * EIGHTS + high // 8)
            border.store(gl.where(kept[:, None], border.load(piece), 0))
    at = gl.cdiv(high, 8)
    for bit in gl.static_range(EIGHTS.bit_length() - 1):
        if at & (1 << bit) != 0:
            for panel in gl.static_range(PANELS):
                _clear_eights(block, panel * EIGHTS + at, 1 << bit)
        at += at & (1 << bit)
    fence_async_shared()
    cta_sync()
