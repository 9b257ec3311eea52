"""Finds matrix instructions whose descriptors no path, or not every path, has written.

ptxas 12.8 miscompiles two wgmma of different shapes behind one branch whose descriptors begin with
the same addresses: what both need is computed on one side of the branch only, and the other side
multiplies whatever the uniform registers hold. This finds registers that hold nothing yet; where an
earlier value is left in them, only results tell (`tests/gluon`).
"""

from __future__ import annotations

import re

from offline.sass import blocks, predecessors

_DESCRIPTORS = re.compile(r"\bHGMMA\S*\s+R\d+, (?:R\d+, )?gdesc\[UR(\d+)\]")
_WRITTEN = re.compile(r"^(?:@!?\w+ )?(U\w+|R2UR|S2UR|ULDC)((?:\.\w+)*) UR(\d+)\b")


def unwritten(listing: str) -> list[str]:
    """Instructions that may read an unwritten descriptor: lines of SASS as nvdisasm prints it.

    A forward analysis: the uniform registers written on every path to an instruction. Labels that
    are reached by computed jumps alone count as if all were written.
    """
    code = blocks(listing)
    above = predecessors(code)
    written = {name: frozenset().union(*map(_written, b.lines)) for name, b in code.items()}
    everything = frozenset(range(64))
    entry = next(iter(code))
    before = {name: frozenset() if name == entry else everything for name in code}
    changed = True
    while changed:
        changed = False
        for name in code:
            ahead = [before[p] | written[p] for p in above[name]]
            if name == entry or not ahead:
                continue
            found = frozenset.intersection(*ahead)
            if found != before[name]:
                before[name], changed = found, True
    return [line for name, b in code.items() for line in _missing(b.lines, set(before[name]))]


def _written(text: str) -> frozenset[int]:
    found = _WRITTEN.match(text)
    if not found or found[1].startswith(("USETMAXREG", "UTMA", "UBLK")):
        return frozenset()
    first = int(found[3])
    wide = re.search(r"\.(64|WIDE)\b", found[2])
    return frozenset(range(first, first + (2 if wide else 1)))


def _missing(lines: list[str], written: set[int]) -> list[str]:
    found = []
    for text in lines:
        reads = _DESCRIPTORS.search(text)
        if reads and not set(range(int(reads[1]), int(reads[1]) + 4)) <= written:
            found.append(text)
        written |= _written(text)
    return found
