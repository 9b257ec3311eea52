"""Finds matrix instructions whose left operand in registers has been overwritten.

ptxas 12.8 gives rows that a loop multiplies again and again, and 16-bit weights that it computes
anew, the same registers where both products have one shape and begin at one descriptor: from the
second turn on the first product multiplies the weights.
"""

from __future__ import annotations

import re

from offline.sass import Block, blocks, predecessors

_LEFT = re.compile(r"\bHGMMA\S*\s+R\d+, R(\d+), gdesc")
_WRITTEN = re.compile(r"^(?:@!?\w+ )?([A-Z0-9]+)((?:\.\w+)*) (?:U?P\w+, )*R(\d+)\b")
_WRITES_NOTHING = (
    "ST",
    "RED",
    "BAR",
    "R2UR",
    "SYNCS",
    "UTMA",
    "UBLK",
    "ATOMS.ARRIVE",
    "ISETP",
    "FSETP",
)
_WIDTHS = {"64": 2, "128": 4, "WIDE": 2, "M88.4": 4}

Definitions = dict[int, frozenset[str]]


def overwritten(listing: str) -> list[str]:
    """Products whose left operand may come from loads and from arithmetic: lines of SASS.

    A forward analysis: which instructions may have written each register last.
    """
    code = blocks(listing)
    above = predecessors(code)
    before: dict[str, Definitions] = {name: {} for name in code}
    changed = True
    while changed:
        changed = False
        for name in code:
            merged: dict[int, set[str]] = {}
            for p in above[name]:
                for register, kinds in _behind(code[p], before[p]).items():
                    merged.setdefault(register, set()).update(kinds)
            found = {register: frozenset(kinds) for register, kinds in merged.items()}
            if found != before[name]:
                before[name], changed = found, True
    return [line for name, block in code.items() for line in _mixed(block, before[name])]


def _behind(block: Block, before: Definitions) -> Definitions:
    found = dict(before)
    for line in block.lines:
        _write(line, found)
    return found


def _write(line: str, last: Definitions) -> None:
    written = _WRITTEN.match(line)
    if not written or written[1].startswith(_WRITES_NOTHING):
        return
    kind = "load" if written[1].startswith("LD") else "arithmetic"
    width = max([1, *(w for suffix, w in _WIDTHS.items() if f".{suffix}" in f"{written[2]}.")])
    if written[1] == "HGMMA":
        width = int(written[2].split("x")[1]) // 2
    first = int(written[3])
    for register in range(first, first + width):
        older = last.get(register, frozenset()) if line.startswith("@") else frozenset()
        last[register] = older | {kind}


def _mixed(block: Block, before: Definitions) -> list[str]:
    found, last = [], dict(before)
    for line in block.lines:
        left = _LEFT.search(line)
        if left:
            registers = range(int(left[1]), int(left[1]) + 4)
            if any(len(last.get(register, ())) > 1 for register in registers):
                found.append(line)
        _write(line, last)
    return found
