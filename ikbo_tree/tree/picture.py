"""How a tree looks in text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ikbo_tree.extras import require

if TYPE_CHECKING:
    from ikbo_tree.tree.broadcast_tree import BroadcastTree

CHILDREN_SHOWN = 4
"""Children of one row that a picture lists; it counts the rest."""


def describe(tree: BroadcastTree) -> str:
    """One line: levels with rows, branches in brackets, tables, order, device."""
    notes = [] if tree.is_sorted else ["unsorted"]
    notes += [
        f"{name}: {tree.capacity(name)} rows off {tree.table_level(name)}" for name in tree.tables
    ]
    notes.append(str(tree.device))
    return f"BroadcastTree({_branch(tree, 0)}, {', '.join(notes)})"


def _branch(tree: BroadcastTree, level: int) -> str:
    name = tree.levels[level]
    size = tree.capacity(name)
    text = f"{name} {size}"
    if tree._schema.padded and tree._host is not None:
        text = f"{name} {tree.rows(name)}/{size}"
    below = [i for i, p in enumerate(tree.structure.parent) if p == level]
    branches = [_branch(tree, i) for i in below]
    if len(branches) == 1:
        return f"{text} -> {branches[0]}"
    return f"{text} -> [{'; '.join(branches)}]" if branches else text


def show(tree: BroadcastTree, requests: int) -> None:
    """See `BroadcastTree.show`."""
    console = require("rich.console", "cli").Console()
    rich_tree = require("rich.tree", "cli")
    root = tree.levels[0]
    picture = rich_tree.Tree(describe(tree))
    rows = tree.rows(root)
    for row in range(min(requests, rows)):
        _grow(tree, picture, 0, row)
    if rows > requests:
        picture.add(f"... {rows - requests} more {root} rows")
    console.print(picture)


def _grow(tree: BroadcastTree, node: Any, level: int, row: int) -> None:
    """Adds one row and, below it, its children at every level that hangs under it."""
    name = tree.levels[level]
    branch = node.add(_label(tree, name, row))
    for below, parent in enumerate(tree.structure.parent):
        if parent != level:
            continue
        route = tree.route(tree.levels[below], name)
        assert route is not None
        begin, end = (int(v) for v in route.offsets[row : row + 2])
        leaf = all(p != below for p in tree.structure.parent)
        children = range(begin, end) if route.order is None else route.order[begin:end].tolist()
        if leaf:
            branch.add(_run(tree.levels[below], list(children)))
            continue
        for child in children[:CHILDREN_SHOWN]:
            _grow(tree, branch, below, child)
        if len(children) > CHILDREN_SHOWN:
            branch.add(f"... {len(children) - CHILDREN_SHOWN} more {tree.levels[below]} rows")


def _label(tree: BroadcastTree, level: str, row: int) -> str:
    keys = {} if tree._host is None else tree._host.keys
    return f"{level} {row}" + (f" ({keys[level][row]})" if level in keys else "")


def _run(level: str, rows: list[int]) -> str:
    """The leaves of one row, as a range where they are one."""
    if not rows:
        return f"no {level}"
    if rows[-1] - rows[0] == len(rows) - 1:
        return f"{level} {rows[0]}" if len(rows) == 1 else f"{level} {rows[0]}..{rows[-1]}"
    shown = ", ".join(str(row) for row in rows[: 2 * CHILDREN_SHOWN])
    return f"{level} {shown}" + (f", ... ({len(rows)})" if len(rows) > 2 * CHILDREN_SHOWN else "")
