"""One caller's request, and the checks that it passes before it meets others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.mapping.integers import as_integers
from ikbo_tree.serving.errors import BadRequestError, TooLargeError
from ikbo_tree.serving.signature import Input, Signature

Values = Tensor | np.ndarray
MAX_ROWS = 1 << 20
"""Rows of any level that a request may have, unless the server says otherwise."""


@dataclass(frozen=True)
class Request:
    """Candidates to score, and what is known about the rows above them.

    Its tensors are not copied before its batch runs: leave them as they are until it is answered.

    Attributes:
        counts: for each level below the root, children of every row of its parent level.
        inputs: for each of the model's inputs [rows of its level, ...], tensors or NumPy arrays.
            For an input at a table: rows of the table's level.
        root_rows: rows of the root; needed only where no level hangs under the root.
        keys: for levels that the model has a table for: [rows] integers or strings. Rows with
            equal keys and equal inputs are computed once, across requests. A level without keys
            is not shared.
        versions: for levels with keys: [rows] integers or strings. Results of coarse parts may be
            kept and taken again for a row with the same key and version, whatever its inputs are,
            so rows whose inputs differ must differ in one of them. A level without versions is
            computed every time.
        order: [rows of the output level] where each of the caller's candidates lies among the
            tree's rows; None: in that order (see `from_log`).
    """

    counts: Mapping[str, Any]
    inputs: Mapping[str, Values]
    root_rows: int | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    order: NDArray[np.int64] | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """A request that any batch can take: what `check` made of it.

    Attributes:
        counts: int64 arrays by level.
        inputs: contiguous CPU tensors by name.
        keys: arrays by level, of the levels that have tables.
        rows: of every level.
        order: as in `Request`.
        versions: as keys; of a level with keys only.
    """

    counts: dict[str, NDArray[np.int64]]
    inputs: dict[str, Tensor]
    keys: dict[str, np.ndarray]
    rows: dict[str, int]
    order: NDArray[np.int64] | None = None
    versions: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What it holds in memory."""
        tensors = sum(x.nbytes for x in self.inputs.values())
        arrays = (*self.counts.values(), *self.keys.values(), *self.versions.values())
        return tensors + sum(x.nbytes for x in arrays)


@dataclass(frozen=True)
class Scores:
    """One request's scores.

    Attributes:
        values: [rows of the output level, ...] on the CPU, in the caller's order.
        level: the output level.
        queue_s: seconds between arrival and the start of its batch.
        run_s: seconds of its batch's run.
        neighbours: other requests in its batch.
    """

    values: Tensor
    level: str
    queue_s: float = 0.0
    run_s: float = 0.0
    neighbours: int = 0


def check(request: Request, signature: Signature, *, max_rows: int = MAX_ROWS) -> Checked:
    """The request as batches take it.

    Args:
        request: from anywhere.
        signature: of the model that shall score it.
        max_rows: most rows of any level.

    Raises:
        BadRequestError: counts, keys or inputs that do not fit the signature or each other, values
            that are not finite or out of bounds.
        TooLargeError: more rows than `max_rows`.
    """
    counts, rows = _counts(request, signature, max_rows)
    _names("inputs", request.inputs, signature.inputs)
    inputs = {
        name: _values(f'inputs["{name}"]', request.inputs[name], given, rows, signature)
        for name, given in signature.inputs.items()
    }
    keys, versions = {}, {}
    for level in dict.fromkeys(signature.tables.values()):
        if request.keys.get(level) is not None:
            keys[level] = _keys(f'keys["{level}"]', request.keys[level], rows[level])
        if request.versions.get(level) is not None:
            argument = f'versions["{level}"]'
            if level not in keys:
                raise BadRequestError(argument, "must come with keys", "none")
            versions[level] = _keys(argument, request.versions[level], rows[level])
    return Checked(counts, inputs, keys, rows, request.order, versions)


def _names(argument: str, given: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise BadRequestError(argument, "must be given by name", type(given).__name__)
    missing = [name for name in wanted if name not in given]
    if missing:
        raise BadRequestError(argument, f"must have {list(wanted)}", f"none for {missing}")
    extra = [name for name in given if name not in wanted]
    if extra:
        raise BadRequestError(argument, f"must be {list(wanted)}", f"also {extra[:8]}")


def _counts(
    request: Request, signature: Signature, max_rows: int
) -> tuple[dict[str, NDArray[np.int64]], dict[str, int]]:
    """Counts as int64, and the rows of every level."""
    _names("counts", request.counts, signature.parents)
    rows = {signature.root: _root_rows(request, signature)}
    if rows[signature.root] > max_rows:
        rule = f"must be at most {max_rows}"
        raise TooLargeError("root_rows", rule, str(rows[signature.root]))
    counts: dict[str, NDArray[np.int64]] = {}
    for level, above in signature.parents.items():
        argument = f'counts["{level}"]'
        given = request.counts[level]
        if isinstance(given, Tensor):
            given = given.detach().cpu().numpy() if given.dtype != torch.bfloat16 else None
        try:
            array = as_integers(argument, given).astype(np.int64, copy=False)
        except TreeError as error:
            raise BadRequestError(error.argument, error.rule, error.got) from None
        if len(array) != rows[above]:
            rule = f"must have one entry for each of the {rows[above]} rows of {above!r}"
            raise BadRequestError(argument, rule, f"{len(array)} entries")
        if array.size and array.min() < 0:
            raise BadRequestError(argument, "must not be negative", str(array.min()))
        # Each entry first: a sum of absurd ones could wrap around.
        largest = int(array.max(initial=0))
        total = largest if largest > max_rows else int(array.sum())
        if total > max_rows:
            raise TooLargeError(argument, f"must add up to at most {max_rows} rows", str(total))
        counts[level], rows[level] = array, total
    return counts, rows


def _root_rows(request: Request, signature: Signature) -> int:
    given = request.root_rows
    if given is None:
        for level, above in signature.parents.items():
            if above == signature.root:
                try:
                    return len(request.counts[level])
                except TypeError:
                    kind = type(request.counts[level]).__name__
                    rule = "must be a 1-D array of integers"
                    raise BadRequestError(f'counts["{level}"]', rule, kind) from None
        raise BadRequestError("root_rows", "must be given where no level is below it", "none")
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise BadRequestError("root_rows", "must be an integer from 0 on", repr(given))
    return given


def _values(
    argument: str, values: Any, given: Input, rows: Mapping[str, int], signature: Signature
) -> Tensor:
    """One input as a contiguous CPU tensor that has passed every check."""
    if isinstance(values, np.ndarray):
        try:  # torch takes no negative strides, and warns of memory that it may not write
            values = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        except (TypeError, ValueError):
            raise BadRequestError(argument, f"must be {given.dtype}", str(values.dtype)) from None
    if not isinstance(values, Tensor):
        raise BadRequestError(argument, "must be a tensor or array", type(values).__name__)
    if values.layout != torch.strided or values.dtype != given.dtype:
        raise BadRequestError(argument, f"must be {given.dtype}", str(values.dtype))
    level = signature.level_of(given.at)
    wanted = (rows[level], *given.shape)
    if tuple(values.shape) != wanted:
        rule = f"must have shape {list(wanted)}, one entry a row of {level!r}"
        raise BadRequestError(argument, rule, str(list(values.shape)))
    values = values.detach().cpu().contiguous()
    # What is not finite makes the sum so; that of finite values may overflow, so look again.
    suspect = given.dtype.is_floating_point and not math.isfinite(values.sum().item())
    if suspect and not bool(torch.isfinite(values).all()):
        at = torch.nonzero(~torch.isfinite(values))[0].tolist()
        raise BadRequestError(argument, "must be finite", f"{values[tuple(at)].item()} at {at}")
    if given.bounds is not None and values.numel():
        low, high = (x.item() for x in values.aminmax())
        if low < given.bounds[0] or high > given.bounds[1]:
            rule = f"must be from {given.bounds[0]} to {given.bounds[1]}"
            raise BadRequestError(argument, rule, str(low if low < given.bounds[0] else high))
    checked: Tensor = values
    return checked


def _keys(argument: str, given: Any, rows: int) -> np.ndarray:
    """[rows] keys of a level, integers or strings."""
    if isinstance(given, Tensor):
        given = given.detach().cpu().numpy()
    rule = f"must be {rows} integers or strings"
    if not isinstance(given, (Sequence, np.ndarray)) or isinstance(given, (str, bytes)):
        raise BadRequestError(argument, rule, type(given).__name__)
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise BadRequestError(argument, rule, str(error)) from None
    # NumPy would make strings of integers in mixed lists, floats of none at all.
    kinds = {isinstance(key, str) for key in given} if isinstance(given, list) else set()
    if array.ndim != 1 or len(array) != rows or len(kinds) > 1:
        raise BadRequestError(argument, rule, f"shape {list(array.shape)}, {array.dtype}")
    if array.size and array.dtype.kind not in "iuUS":
        raise BadRequestError(argument, rule, str(array.dtype))
    return array
