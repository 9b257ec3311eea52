"""All items, those of the article first."""

from __future__ import annotations

from collections.abc import Iterable

from reproduction import attention, beyond, compression, inside
from reproduction.runs import RUNS

_ORDER = (
    compression.STEPS, compression.SWEEPS, inside.ROOFLINE, attention.COMPARISON,
    attention.LENGTHS, attention.ODD, attention.SELF, inside.COUNTERS, inside.TIMELINE,
    inside.ABLATION, inside.NUMERICS,
    compression.DEPTH, beyond.ATTENTION_DEPTH, beyond.UNEVEN, attention.QUERY_ROWS,
    beyond.BACKWARD, beyond.INVARIANCE, beyond.MODEL,
)  # fmt: skip

ITEMS = {item.id: item for item in _ORDER}
"""By id."""


def topics_of(ids: Iterable[str]) -> list[str]:
    """The results files of some items, in the order in which they are measured.

    Raises:
        KeyError: an id that there is not.
    """
    wanted = {topic for name in ids for topic in ITEMS[name].topics}
    return [topic for topic in RUNS if topic in wanted]
