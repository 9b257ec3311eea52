"""Trees as Python source, and the same tree with spare rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ikbo_tree.tree import BroadcastTree


def tree_code(tree: BroadcastTree) -> str:
    """Python source of one expression that builds an equal tree.

    Long regular lists are written short, `[2, 0] * 500`. The device is left out.

    >>> print(tree_code(BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")))
    BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
    """
    constructor, arguments = description(tree)
    code = f"BroadcastTree.{constructor}({_call(arguments)})"
    for table in _tables(tree):
        code += f".with_table({_call(table)})"
    return code


def with_capacity(tree: BroadcastTree, extra: Mapping[str, int]) -> BroadcastTree:
    """The same rows with `extra[name]` dead rows behind those of each level and table named.

    Other levels and tables get none; a tree with spare rows must be asked for all of it.
    """
    constructor, arguments = description(tree)
    arguments["capacity"] = {level: tree.rows(level) + extra.get(level, 0) for level in tree.levels}
    padded: BroadcastTree = getattr(BroadcastTree, constructor)(**_plain(arguments))
    for table in _tables(tree):
        table["capacity"] = table["rows"] + extra.get(table["name"], 0)
        padded = padded.with_table(**_plain(table))
    return padded.to(tree.device)


def description(tree: BroadcastTree) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the constructor that builds the tree, tables left out."""
    root = tree.levels[0]
    arguments: dict[str, Any] = {}
    below = tree.levels[1:]
    if tree.is_sorted:
        constructor = "from_counts"
        arguments["counts"] = {level: _counts(tree, level) for level in below}
    else:
        constructor = "from_parents"
        arguments["parents"] = {
            level: tree.parents(level)[: tree.rows(level)].tolist() for level in below
        }
    arguments["root"] = root
    if not tree.is_sorted or root not in map(tree.parent, below):
        arguments["root_rows"] = tree.rows(root)
    under = {
        level: tree.parent(level)
        for above, level in zip(tree.levels, below, strict=False)
        if tree.parent(level) != above
    }
    if under:
        arguments["under"] = under
    capacity = {
        level: tree.capacity(level)
        for level in tree.levels
        if tree.capacity(level) != tree.rows(level)
    }
    if capacity:
        arguments["capacity"] = capacity
    elif tree.live(root) is not None:  # built with a capacity and full
        arguments["capacity"] = {root: tree.rows(root)}
    return constructor, arguments


def _counts(tree: BroadcastTree, level: str) -> list[int]:
    counts: list[int] = tree.counts(level)[: tree.rows(str(tree.parent(level)))].tolist()
    return counts


def _tables(tree: BroadcastTree) -> list[dict[str, Any]]:
    tables = []
    for name in tree.tables:
        of = tree.table_level(name)
        index = tree.ancestors(of, of=name)[: tree.rows(of)].tolist()
        table = {"name": name, "of": of, "index": index, "rows": tree.rows(name)}
        if tree.capacity(name) != tree.rows(name):
            table["capacity"] = tree.capacity(name)
        tables.append(table)
    return tables


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """With lists as arrays: an empty list has no dtype."""
    return {name: _array(value) for name, value in arguments.items()}


def _array(value: Any) -> Any:
    if isinstance(value, list):
        return np.asarray(value, np.int64)
    if isinstance(value, dict):
        return {name: _array(entry) for name, entry in value.items()}
    return value


def _call(arguments: Mapping[str, Any]) -> str:
    parts = []
    for name, value in arguments.items():
        first = name in ("counts", "parents") or (name == "name" and "of" in arguments)
        parts.append(_literal(value) if first else f"{name}={_literal(value)}")
    return ", ".join(parts)


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}": {_literal(v)}' for k, v in value.items()) + "}"
    if isinstance(value, str):
        return f'"{value}"'
    return _list(value) if isinstance(value, list) else repr(value)


def _list(values: Sequence[int]) -> str:
    """A list's source; stretches of one repeated pattern are written as a product."""
    parts: list[str] = []
    plain: list[int] = []
    at = 0
    while at < len(values):
        length, repeats = _repeated(values, at)
        if repeats * length <= 12:
            plain.append(values[at])
            at += 1
            continue
        if plain:
            parts.append(repr(plain))
        parts.append(f"{list(values[at : at + length])} * {repeats}")
        plain = []
        at += length * repeats
    if plain or not parts:
        parts.append(repr(plain))
    return " + ".join(parts)


def _repeated(values: Sequence[int], at: int) -> tuple[int, int]:
    """Length and repeats of the pattern that covers the most from `at` on."""
    best = (1, 1)
    for length in range(1, 13):
        pattern = values[at : at + length]
        repeats = 1
        while values[at + repeats * length : at + (repeats + 1) * length] == pattern:
            repeats += 1
        if repeats > 1 and repeats * length > best[0] * best[1]:
            best = (length, repeats)
    return best
