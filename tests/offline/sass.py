"""SASS as nvdisasm prints it, in basic blocks."""

from __future__ import annotations

import re

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


class Block:
    """Attributes: lines: its instructions; targets: names of the blocks that may follow."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.targets: list[str] = []


def blocks(listing: str) -> dict[str, Block]:
    """Basic blocks by name, in order; the first one is where the kernel begins."""
    found: dict[str, Block] = {}

    def begin(name: str, falls: bool) -> Block:
        if found and falls:
            found[next(reversed(found))].targets.append(name)
        found[name] = Block()
        return found[name]

    block = begin("entry", False)
    falls = True
    for raw in listing.splitlines():
        label = _LABEL.match(raw.strip())
        if label:
            block = begin(label[1], falls)
            falls = True
            continue
        line = _LINE.search(raw)
        if not line:
            continue
        text = re.sub(r"\s+", " ", line[2]).strip()
        if not falls:
            block = begin(f"behind {line[1]}", False)
            falls = True
        block.lines.append(text)
        operation = re.sub(r"^@!?\w+ ", "", text)
        if operation.startswith(("BRA", "BRX", "EXIT", "RET", "JMP")):
            block.targets += _TARGET.findall(text)
            unconditional = text == operation and not re.search(r"\bU?P\d\b", text)
            if unconditional:
                falls = False
            else:
                block = begin(f"behind {line[1]}", True)
    return found


def predecessors(of: dict[str, Block]) -> dict[str, list[str]]:
    """Names of the blocks that each block may follow."""
    found: dict[str, list[str]] = {name: [] for name in of}
    for name, block in of.items():
        for target in block.targets:
            found[target].append(name)
    return found
