"""Device code that the roles of the Hopper attention kernel share.

A block's warps have roles: a *scheduler* finds what is to do, a *producer* fetches it by TMA, two
*consumers* of four warps compute 64 query rows each of a tile of 128. They meet at barriers in
shared memory:

    told[b]       the scheduler has written board b: the work whose queries lie in buffer b
    q_full[b]     the queries of that work have landed; or, behind the last work, nothing has
    q_empty[b]    both consumers have read board b and their results have left buffer b
    kv_full[s]    a block of keys or values has landed in slot s of the ring
    kv_empty[s]   both consumers' matrix instructions that read it have ended

A *work* is a run of up to 128 folded query rows and one head, and the keys of up to four memories
that all of them attend to. Its keys come in this order, which depends on nothing but how many each
memory has: first the last block of each memory that has any (the only one that needs a mask), then
the other blocks, memory by memory. A last block is full wherever there are enough keys: it repeats
keys that come once more later, and the mask leaves those out.

Query rows come from one or two *spaces*: rows below the memories (target rows) and, where there is
a second one, *own* rows, one for each key of the only memory. A causal own work has the keys up to
its last row: the blocks that rows and keys share, of which each counts as a memory of its own, come
first, and all others count in full.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

TILE = gl.constexpr(128)
"""Folded query rows of a tile."""
HALF = gl.constexpr(64)
"""Of which each consumer has so many: the rows of a matrix instruction."""

SMALLEST = gl.constexpr(2.0**-120)
"""Stands in for a factor of scores of 0, with which -inf would make NaN."""

# Words of a board, int32.
ROW = gl.constexpr(0)
"""The first folded query row."""
ROWS = gl.constexpr(1)
"""How many there are, 1 to 128; 0: no more work."""
HEAD = gl.constexpr(2)
WHOLE = gl.constexpr(3)
"""Blocks of keys behind the last blocks."""
SPANS = gl.constexpr(4)
"""Memories that have keys at all."""
LOW = gl.constexpr(5)
"""First column that counts of each last block, in the order of use: 4 words."""
HIGH = gl.constexpr(9)
"""And behind the last one."""
BLOCKS = gl.constexpr(13)
"""Blocks of each memory: 4 words."""
OWNER = gl.constexpr(17)
"""A padded memory's row; 0 in a packed one: 4 words."""
START = gl.constexpr(21)
"""A memory's first key, counted in the row or in all of a packed memory: 4 words."""
LAST = gl.constexpr(25)
"""The first key of its last block, likewise: 4 words."""
DIAGONAL = gl.constexpr(29)
"""Of causal calls: columns beyond this one are later than the first query row, in each last block
of own rows: 2 words."""
SPACE = gl.constexpr(31)
"""Where the rows come from: 0: target rows, 1: own rows."""


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """The next slot of the ring, and the parity of the barriers there."""
    slot = slot + 1
    wrap = slot == SLOTS
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def viewed(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory as another array."""
    if _HAS_REINTERPRET:
        view = memory.reinterpret(dtype, shape, layout)
    else:
        view = memory._reinterpret(dtype, shape, layout)
    return view


@gluon.jit
def matrix(memory, R: gl.constexpr, C: gl.constexpr):
    """A TMA box with dims of size 1 as [R, C]: the bytes lie in the same places."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([R, C], memory.dtype)
    return viewed(memory, memory.dtype, [R, C], layout)
