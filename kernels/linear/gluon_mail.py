"""How the loading warp tells the consumers which tile comes next: a ring of words in shared memory.

A message has eight words about the tile, and five about each producer of its level:

    BITS      1: of the tree's last level; 2: adds the bias; 4: all its partials can be read; or END
    STEPS     over K
    ROW       first row
    COLUMN    column block
    LIVE      live rows of its level
    OWN       its level's first row among all partial results
    LEVEL     its level's number
    (one more, unused)

    LOW, HIGH the address of the producer's map; 0: row to row
    BASE      the producer's first row among all partial results; -1: there is none
    COUNTER   the producer's level
    TARGET    what that level's counter has reached when all its results can be read

Words are read when they are needed, up to the tile's end. `sent[i]` orders them before their
reading (one arrival, the loading warp's). Nothing more is needed to order reading before the next
message in the slot: message n + SLOTS is sent when all steps of the tile before it are loaded, so
all but `stages` of the steps before it have been given back by both consumers. With two steps a
tile or more these include the first of tile n + 1 if 2 (SLOTS - 1) > stages; and whoever gave that
back was done with tile n.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SLOTS = gl.constexpr(8)
END = gl.constexpr(8)

BITS, STEPS, ROW, COLUMN, LIVE, OWN, LEVEL = (gl.constexpr(i) for i in range(7))
LOW, HIGH, BASE, COUNTER, TARGET = (gl.constexpr(8 + i) for i in range(5))
PER_PRODUCER = gl.constexpr(5)

_WORDS = gl.constexpr(32)
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
def write(mail, number, WORD: gl.constexpr, value):
    """Writes a word of message `number`, from a partition of one warp."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mail[0].index(number % SLOTS * _WORDS + WORD).store(gl.full([1], value, gl.int32, L))


@gluon.jit
def send(mail, number):
    """Sends message `number`, whose words are written."""
    mbarrier.arrive(mail[1].index(number % SLOTS))


@gluon.jit
def await_message(mail, number):
    """Waits for message `number`, in a consumer."""
    mbarrier.wait(mail[1].index(number % SLOTS), (number // SLOTS) & 1)


@gluon.jit
def read(mail, number, WORD: gl.constexpr):
    """A word of message `number`, in a consumer that has it."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return mail[0].index(number % SLOTS * _WORDS + WORD).load(L).item()
