"""Both faults of ptxas that are known to make Hopper's matrix instructions wrong."""

from __future__ import annotations

from offline.descriptors import unwritten
from offline.operands import overwritten


def miscompiled(listing: str) -> list[str]:
    """Lines of SASS that read an unwritten descriptor or an overwritten left operand."""
    return unwritten(listing) + overwritten(listing)
