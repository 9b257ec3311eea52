"""Tiles that `ikbo-tree tune` wrote, in place of the frozen ones of the same calls.

The environment variable `IKBO_TREE_TILES` names the file; it is read once, before the first kernel
runs. Like the frozen ones, tiles are found by op, role, architecture, dtype and widths, never by
row counts: the rows of a request keep their bits in any batch (contract 4).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "IKBO_TREE_TILES"

Fields = Mapping[str, Any]
"""The fields of a tile, and beside them whatever else an op's choice has."""

_overridden: dict[str, Fields] = {}


def key_of(op: str, role: str, *sizes: object) -> str:
    """The key of a choice in a file: `"linear_compression forward sm_90 float16 433 256"`."""
    return " ".join(str(part).removeprefix("torch.") for part in (op, role, *sizes))


def entry(op: str, role: str, *sizes: object) -> Fields | None:
    """The choice for a call, or None where the frozen one holds."""
    if not _overridden and not _file():
        return None
    key = key_of(op, role, *sizes)
    return _overridden.get(key) or _file().get(key)


@contextlib.contextmanager
def override(key: str, fields: Fields) -> Iterator[None]:
    """Chooses so inside; for the command that tries them."""
    _overridden[key] = fields
    try:
        yield
    finally:
        del _overridden[key]


@functools.cache
def _file() -> dict[str, Fields]:
    """What the file has.

    Raises:
        ValueError: it is not what `ikbo-tree tune` writes.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return {}
    try:
        tiles: dict[str, Fields] = json.loads(Path(path).read_text())["tiles"]
        if all("tile" in fields for fields in tiles.values()):
            return tiles
        reason = "an entry without a tile"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = repr(error)
    raise ValueError(f"{VARIABLE} must name a file from `ikbo-tree tune`; {path!r}: {reason}")
