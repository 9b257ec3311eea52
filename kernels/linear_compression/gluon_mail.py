"""How the loading warp tells the consumers which tile comes next: a ring of words in shared memory.

A message has eight words:

    bits      1: of the tree's last level; 2: a pair; 4: its first partial can be read; or END
    steps     over K
    row       of the result or, of an earlier level, of all partial results
    block     first row block
    column    column block
    parents   three rows of all partial results that are added; -1: none

`sent[i]` orders a message's words before their reading (one arrival, the loading warp's). Nothing
more is needed to order reading before the next message in the slot: message n + SLOTS is sent when
all steps of the tile before it are loaded, so all but `stages` of the steps before it have been
given back by both consumers. With two steps a tile or more these include the first of tile n if
2 SLOTS > stages; and whoever gave it back had read message n.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS = gl.constexpr(8)
END = gl.constexpr(8)
_WORDS = gl.constexpr(8)
_WORD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def open_mail():
    """The ring, empty: words and `sent`."""
    words = gl.allocate_shared_memory(gl.int32, [SLOTS * _WORDS, 1], _WORD)
    sent = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(sent.index(i), count=1)
    return words, sent


@gluon.jit
def send(mail, number, message):
    """Sends message `number`, a tuple of eight scalars, from a partition of one warp."""
    words, sent = mail
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = number % SLOTS
    for i in gl.static_range(_WORDS):
        words.index(slot * _WORDS + i).store(gl.full([1], message[i], gl.int32, L))
    mbarrier.arrive(sent.index(slot))


@gluon.jit
def receive(mail, number):
    """Message `number`, in a consumer."""
    words, sent = mail
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = number % SLOTS
    mbarrier.wait(sent.index(slot), (number // SLOTS) & 1)
    message = ()
    for i in gl.static_range(_WORDS):
        message = message + (words.index(slot * _WORDS + i).load(L).item(),)  # noqa: RUF005
    return message
