"""Finds matrix instructions whose descriptors no path, or not every path, has written.

ptxas 12.8 miscompiles two wgmma of different shapes behind one branch whose descriptors begin with
the same addresses: what both need is computed on one side of the branch only, and the other side
multiplies whatever the uniform registers hold. This finds registers that hold nothing yet; where an
earlier value is left in them, only results tell (`tests/gluon`).
"""

from __future__ import annotations

import re
from collections import defaultdict

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_DESCRIPTORS = re.compile(r"\bHGMMA\S*\s+R\d+, gdesc\[UR(\d+)\]")
_WRITTEN = re.compile(r"^(?:@!?\w+ )?(U\w+|R2UR|S2UR|ULDC)((?:\.\w+)*) UR(\d+)\b")


def unwritten(listing: str) -> list[str]:
    """Instructions that may read an unwritten descriptor: lines of SASS as nvdisasm prints it.

    A forward analysis: the uniform registers written on every path to an instruction. Labels that
    are reached by computed jumps alone count as if all were written.
    """
    blocks, order = _blocks(listing)
    predecessors: dict[str, list[str]] = defaultdict(list)
    for name in order:
        for target in blocks[name].targets:
            predecessors[target].append(name)
    everything = frozenset(range(64))
    entry = order[0]
    before = {name: frozenset() if name == entry else everything for name in order}
    changed = True
    while changed:
        changed = False
        for name in order:
            above = [before[p] | blocks[p].written for p in predecessors[name]]
            if name == entry or not above:
                continue
            found = frozenset.intersection(*above)
            if found != before[name]:
                before[name], changed = found, True
    return [line for name in order for line in _missing(blocks[name].lines, set(before[name]))]


class _Block:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.targets: list[str] = []
        self.written: frozenset[int] = frozenset()


def _blocks(listing: str) -> tuple[dict[str, _Block], list[str]]:
    """Basic blocks by name, in order, with where each goes on."""
    blocks: dict[str, _Block] = {}
    order: list[str] = []

    def begin(name: str, falls: bool) -> _Block:
        if order and falls:
            blocks[order[-1]].targets.append(name)
        blocks[name] = _Block()
        order.append(name)
        return blocks[name]

    block = begin("entry", False)
    falls = True
    for raw in listing.splitlines():
        label = _LABEL.match(raw.strip())
        if label:
            block = begin(label[1], falls)
            falls = True
            continue
        found = _LINE.search(raw)
        if not found:
            continue
        text = re.sub(r"\s+", " ", found[2]).strip()
        if not falls:
            block = begin(f"behind {found[1]}", False)
            falls = True
        block.lines.append(text)
        block.written |= _written(text)
        operation = re.sub(r"^@!?\w+ ", "", text)
        if operation.startswith(("BRA", "BRX", "EXIT", "RET", "JMP")):
            block.targets += _TARGET.findall(text)
            unconditional = text == operation and not re.search(r"\bU?P\d\b", text)
            if unconditional:
                falls = False
            else:
                block = begin(f"behind {found[1]}", True)
    return blocks, order


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
