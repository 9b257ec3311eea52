"""Requests as flat logs: one row a candidate, in any order, with a key column for each level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.serving.errors import BadRequestError
from ikbo_tree.serving.request import Request, Values
from ikbo_tree.serving.signature import Signature
from ikbo_tree.tree import BroadcastTree


def from_log(
    signature: Signature,
    keys: Mapping[str, Any],
    inputs: Mapping[str, Values],
    rows: Mapping[str, Any],
    versions: Mapping[str, Any] | None = None,
) -> Request:
    """A request from key columns; its scores come back in the log's order.

    Args:
        signature: of the model: a chain of levels with scores at the last.
        keys: for each level a column [candidates] of integers or strings, as
            `BroadcastTree.from_keys` takes them.
        inputs: of the last level [candidates, ...]; of the others [keys in `rows`, ...].
        rows: for each level above the last that has inputs, the distinct keys of their rows.
        versions: for levels in `rows`, one for each of these keys (see `Request`).

    Raises:
        BadRequestError: columns that are missing, unequal or no keys; a key that `rows` lacks or
            has twice; versions of other levels or of another length.
    """
    levels = signature.levels
    if not signature.is_chain or signature.output != levels[-1]:
        raise BadRequestError("keys", "must be counts for a model of another shape", "keys")
    missing = [level for level in levels if level not in keys]
    if missing or len(keys) != len(levels):
        raise BadRequestError(
            "keys", f"must have a column for each of {list(levels)}", str([*keys])
        )
    columns = {level: np.asarray(_host(keys[level])) for level in levels}
    try:
        tree = BroadcastTree.from_keys(columns)
        order = np.lexsort([tree.ancestors(levels[-1], of=level) for level in levels[-2::-1]])
        if not tree.is_sorted:
            columns = {level: column[order] for level, column in columns.items()}
            tree = BroadcastTree.from_keys(columns)
    except TreeError as error:
        raise BadRequestError(error.argument, error.rule, error.got) from None
    taken = {}
    for name, values in inputs.items():
        given = signature.inputs.get(name)
        if given is None:
            taken[name] = values
            continue
        level = signature.level_of(given.at)
        wanted = order if level == levels[-1] else _places(level, rows, tree)
        taken[name] = _take(f'inputs["{name}"]', values, wanted, level, rows)
    return Request(
        counts={level: tree.counts(level) for level in signature.parents},
        inputs=taken,
        root_rows=tree.rows(levels[0]),
        keys={level: tree.keys(level) for level in signature.tables.values()},
        order=order,
        versions=_versions(signature, versions or {}, rows, tree),
    )


def _versions(
    signature: Signature, given: Mapping[str, Any], rows: Mapping[str, Any], tree: BroadcastTree
) -> dict[str, list[Any]]:
    """The versions of the tree's rows."""
    found = {}
    for level, listed in given.items():
        if level not in signature.tables.values():
            rule = f"must be of levels with tables, {[*signature.tables.values()]}"
            raise BadRequestError("versions", rule, repr(level))
        wanted = _places(level, rows, tree).tolist()
        known = listed.tolist() if isinstance(listed, (np.ndarray, Tensor)) else listed
        if not isinstance(known, list) or len(known) != len(rows[level]):
            rule = f"must be {len(rows[level])} integers or strings"
            raise BadRequestError(f'versions["{level}"]', rule, type(listed).__name__)
        found[level] = [known[at] for at in wanted]
    return found


def _host(column: Any) -> Any:
    return column.detach().cpu().numpy() if isinstance(column, Tensor) else column


def _places(level: str, rows: Mapping[str, Any], tree: BroadcastTree) -> np.ndarray:
    """For each row of the tree's level its position among the caller's rows."""
    argument = f'rows["{level}"]'
    if level not in rows:
        raise BadRequestError(argument, "must name the keys of the level's inputs", "none")
    known = np.asarray(_host(rows[level]))
    if known.ndim != 1 or (known.size and known.dtype.kind not in "iuUS"):
        rule = "must be a list of integers or strings"
        raise BadRequestError(argument, rule, f"{known.dtype}, shape {list(known.shape)}")
    place = {key: at for at, key in enumerate(known.tolist())}
    if len(place) < len(known):
        raise BadRequestError(argument, "must be distinct", f"{len(known) - len(place)} repeated")
    wanted = tree.keys(level).tolist()
    unknown = [key for key in wanted if key not in place]
    if unknown:
        raise BadRequestError(argument, "must have every key of the log", f"none for {unknown[:4]}")
    return np.array([place[key] for key in wanted], dtype=np.int64)


def _take(
    argument: str, values: Any, wanted: np.ndarray, level: str, rows: Mapping[str, Any]
) -> Tensor:
    if isinstance(values, np.ndarray):
        try:
            values = torch.from_numpy(np.array(values))
        except TypeError:
            raise BadRequestError(argument, "must hold numbers", str(values.dtype)) from None
    if not isinstance(values, Tensor):
        raise BadRequestError(argument, "must be a tensor or array", type(values).__name__)
    expected = len(rows[level]) if level in rows else len(wanted)
    if not values.dim() or len(values) != expected:
        shape = list(values.shape)
        raise BadRequestError(argument, f"must have {expected} rows", f"shape {shape}")
    return values[torch.from_numpy(wanted)]
