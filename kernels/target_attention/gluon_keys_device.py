"""What the roles of the Hopper gradient kernel of keys and values share.

A block's warps have roles: a *scheduler* finds what is to do, a *producer* fetches it, two
*consumers* of four warps compute 64 keys each of a tile of 128. They meet at barriers in shared
memory:

    told[b]       the scheduler has written board b: the work whose keys lie in buffers b
    kv_full[b]    the keys and values of that work have landed; or, behind the last work, nothing
    kv_empty[b]   both consumers have read board b and their results have left buffers b
    full[s]       a block of query rows has landed in stage s: queries, gradients of the output (by
                  TMA) and what is known of each row (written by the producer)
    empty[s]      both consumers' matrix instructions that read it have ended

A *work* is a tile of keys of one row of a memory, one of the keys' heads, and a piece of the query
rows below it: all of them unless they are very many. The query rows come in blocks of 64 from the
piece's first one on, head after head of those that share the keys. The last block of a head may be
short: rows of others, which may be anything, are cleared.

A consumer keeps dK and dV of its keys in registers and computes S and dP with keys as rows, so that
P and dS are left operands where they are; nothing but results is ever written to shared memory.

    S^T = K Q^T    dP^T = V dO^T    P = exp2(S - lse)    dV += P^T dO
                                    dS = P (dP - delta)   dK += dS^T Q
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental.gluon import language as gl

KEYS_TILE = gl.constexpr(128)
"""Keys of a tile, of which each consumer has half."""
HALF = gl.constexpr(64)
BLOCK = gl.constexpr(64)
"""Query rows of a block."""

# Words of a board, int32.
STEPS = gl.constexpr(0)
"""Blocks of query rows of all heads together; 0: no more work."""
ROW = gl.constexpr(1)
"""The piece's first folded query row."""
ROWS = gl.constexpr(2)
"""How many it has, of each head."""
HEAD = gl.constexpr(3)
"""Of the keys."""
OWNER = gl.constexpr(4)
"""A padded memory's row; 0 in a packed one."""
KEY = gl.constexpr(5)
"""The tile's first key, counted in the row or in all of a packed memory."""
KEYS = gl.constexpr(6)
"""How many keys it has, 1 to 128."""
SLOT = gl.constexpr(7)
"""Where sums of pieces lie; -1: the work is all there is."""
ADDS = gl.constexpr(8)
"""1: to what lies in the slot; 0: to nothing."""
ENDS = gl.constexpr(9)
"""1: the sums are the results; 0: they go to the slot."""
