"""What the roles of the Hopper gradient kernel of queries share.

Roles are as in the forward: a *scheduler*, a *producer*, two *consumers* of 64 query rows each of a
tile of 128. They meet at barriers in shared memory:

    told[b]    the scheduler has written board b, for works number b, b + 2, ...
    freed[b]   both consumers have done that work
    q_full     queries, gradients of the output and the output of a work's rows have landed; or,
               behind the last work, nothing has
    q_empty    both consumers have them in registers
    full[s]    a block of keys and values has landed in stage s of the ring
    empty[s]   both consumers' matrix instructions that read it have ended

A *work* is a run of up to 128 folded query rows and one head, and the keys of up to four memories
that all of them attend to; it has none where rows are dead or attend to nothing, and the result is
zeros then. The keys' order depends on nothing but how many each memory has: first the last block of
each memory that has any (the only one that needs a mask), then the other blocks, memory by memory.
A last block is full wherever there are enough keys: it repeats keys that come once more later, and
the mask leaves those out.

A consumer holds its queries and output gradients in registers, as left operands, which leaves
shared memory and its bandwidth to keys and values; dS is one where it is computed:

    S = Q K^T    dP = dO V^T    P = exp2(S - lse)    dS = P (dP - delta)    dQ += dS K
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental.gluon import language as gl

TILE = gl.constexpr(128)
"""Folded query rows of a tile, of which each consumer has half."""
HALF = gl.constexpr(64)

# Words of a board, int32.
ROW = gl.constexpr(0)
"""The first folded query row."""
ROWS = gl.constexpr(1)
"""How many there are, 1 to 128; 0: no more work."""
HEAD = gl.constexpr(2)
STEPS = gl.constexpr(3)
"""Blocks of keys."""
SPANS = gl.constexpr(4)
"""Memories that have keys at all: so many of the blocks are last ones and come first."""
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
ITEM = gl.constexpr(29)
"""The item that the work is of."""
