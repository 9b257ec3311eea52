"""Trees from what other libraries hold ragged data in; each is imported when it is asked for.

torch.nested jagged tensors    from_jagged
torchrec KeyedJaggedTensor     from_keyed_jagged
Awkward Array                  from_awkward          (extra `interop`)
Arrow list columns             from_arrow            (extra `interop`)
Polars list columns            from_polars           (extra `interop`)

Only lengths are read. Features stay where they are: the values of a jagged tensor, or a flattened
list column, have the rows of their level in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.extras import require
from ikbo_tree.tree import BroadcastTree

Step = Callable[[Any, str, str | None], tuple[NDArray[np.int64], Any]]
"""`(rows, level, field)` -> children of each row at the level, and those children."""


def from_jagged(
    jagged: Mapping[str, Tensor],
    *,
    root: str,
    under: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> BroadcastTree:
    """A tree from `torch.nested` tensors of layout `torch.jagged`, one a level.

    `x.values()` has the level's rows. (`tree.start(level)` is where they begin in it, if not at 0.)

    Args:
        jagged: for each level below the root, coarse first, a nested tensor [rows of its parent
            level, ragged, ...].
        root: the root level's name.
        under: as in `BroadcastTree.from_counts`.
        device: where the maps go; default where the first tensor is. From a GPU this waits.

    Raises:
        TreeError: no nested tensor of that layout, or one with holes; lengths that do not fit.

    >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    >>> from_jagged({"item": nested}, root="user")
    BroadcastTree(user 2 -> item 3, cpu)
    """
    offsets: dict[str, Tensor] = {}
    for level, x in jagged.items():
        argument = f'jagged["{level}"]'
        nested = cast(Any, x)  # torch's own stubs know neither its lengths nor symbolic sizes
        if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
            got = type(nested).__name__
            if isinstance(x, Tensor):
                got = f"a {'nested' if x.is_nested else 'dense'} tensor of layout {x.layout}"
            raise TreeError(argument, "must be a nested tensor of layout torch.jagged", got)
        if isinstance(nested.shape[1], int):
            raise TreeError(argument, "must be ragged in dim 1", f"shape {tuple(x.shape)}")
        if nested.lengths() is not None:
            raise TreeError(argument, "must be contiguous: call .contiguous()", "one with holes")
        offsets[level] = nested.offsets()
    if device is None and offsets:
        device = next(iter(offsets.values())).device
    return BroadcastTree.from_offsets(offsets, root=root, under=under, device=device)


def from_keyed_jagged(
    features: Any,
    levels: Mapping[str, str],
    *,
    root: str,
    under: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> BroadcastTree:
    """A tree from the lengths of a torchrec `KeyedJaggedTensor`.

    `features[key].values()` has the level's rows. Keys of several batch sizes (a variable stride)
    may be levels below each other.

    Args:
        features: a `KeyedJaggedTensor`.
        levels: for each level below the root, coarse first, the key whose lengths are its counts.
        root: the root level's name, the batch.
        under: as in `BroadcastTree.from_counts`: where all keys have one batch size, each level but
            the first hangs `under` the root.
        device: where the maps go; default where the lengths are. From a GPU this waits.

    Raises:
        TreeError: a key that is not there, or lengths that do not fit.
    """
    known = list(features.keys())
    counts = {}
    for level, key in levels.items():
        if key not in known:
            raise TreeError(f'levels["{level}"]', f"must be one of the keys {known}", repr(key))
        counts[level] = features[key].lengths()
    if device is None and counts:
        device = next(iter(counts.values())).device
    return BroadcastTree.from_counts(counts, root=root, under=under, device=device)


def from_awkward(
    array: Any,
    *,
    levels: Sequence[str],
    fields: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> BroadcastTree:
    """A tree from an Awkward Array of lists in lists.

    Args:
        array: its entries are root rows; lists of variable or fixed length, records on the way if
            `fields` says which of their fields goes on.
        levels: names, root first; lists below the last level belong to its rows.
        fields: for some levels, the field of the records one level above that holds its lists.
        device: as in `BroadcastTree.from_counts`.

    Raises:
        TreeError: a list is missing (None) or something else stands where a level needs one.
        MissingExtraError: Awkward Array is not installed.
    """
    ak = require("awkward", "interop")

    def whole(rows: Any, level: str) -> Any:
        kept = ak.drop_none(rows, axis=0)
        _check_whole("array", level, len(rows) - len(kept))
        return kept

    def step(rows: Any, level: str, field: str | None) -> tuple[NDArray[np.int64], Any]:
        if field is not None:
            if field not in ak.fields(rows):
                raise _no_field(field, level, str(rows.type.content))
            rows = whole(rows, level)[field]
        rows = whole(rows, level)
        if len(rows) == 0:  # of unknown type, often
            return np.zeros(0, np.int64), rows
        if rows.ndim < 2:
            raise _no_lists("array", level, str(rows.type.content))
        return np.asarray(ak.to_numpy(ak.num(rows, axis=1)), np.int64), ak.flatten(rows, axis=1)

    return _from_lists(ak.to_backend(ak.Array(array), "cpu"), levels, fields, step, device)


def from_arrow(
    column: Any,
    *,
    levels: Sequence[str],
    fields: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> BroadcastTree:
    """A tree from an Arrow column of lists in lists.

    Args:
        column: a pyarrow `Array` or `ChunkedArray`; its entries are root rows. Lists, large lists,
            list views, lists of fixed size; structs on the way if `fields` says which of their
            fields goes on.
        levels: names, root first; lists below the last level belong to its rows.
        fields: for some levels, the field of the structs one level above that holds its lists.
        device: as in `BroadcastTree.from_counts`.

    Raises:
        TreeError: a list is null or something else stands where a level needs one.
        MissingExtraError: pyarrow is not installed.
    """
    pa = require("pyarrow", "interop")
    pc = require("pyarrow.compute", "interop")
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        got = type(column).__name__
        raise TreeError("column", "must be a pyarrow Array or ChunkedArray", got)
    kinds = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")

    def step(rows: Any, level: str, field: str | None) -> tuple[NDArray[np.int64], Any]:
        if field is not None:
            names = [f.name for f in rows.type] if pa.types.is_struct(rows.type) else []
            if field not in names:
                raise _no_field(field, level, str(rows.type))
            _check_whole("column", level, rows.null_count)
            rows = rows.field(field)
        if not any(getattr(pa.types, f"is_{kind}")(rows.type) for kind in kinds):
            raise _no_lists("column", level, str(rows.type))
        _check_whole("column", level, rows.null_count)
        lengths = pc.list_value_length(rows).to_numpy(zero_copy_only=False)
        return np.asarray(lengths, np.int64), pc.list_flatten(rows)

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # in some versions
            column = pa.concat_arrays(column.chunks)
    return _from_lists(column, levels, fields, step, device)


def from_polars(
    series: Any,
    *,
    levels: Sequence[str],
    fields: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
) -> BroadcastTree:
    """A tree from a Polars series of lists in lists.

    Args:
        series: its entries are root rows. Of dtype `List` or `Array`; structs on the way if
            `fields` says which of their fields goes on.
        levels: names, root first; lists below the last level belong to its rows.
        fields: for some levels, the field of the structs one level above that holds its lists.
        device: as in `BroadcastTree.from_counts`.

    Raises:
        TreeError: a list is null or something else stands where a level needs one.
        MissingExtraError: Polars is not installed.
    """
    pl = require("polars", "interop")
    if not isinstance(series, pl.Series):
        raise TreeError("series", "must be a polars Series", type(series).__name__)

    def step(rows: Any, level: str, field: str | None) -> tuple[NDArray[np.int64], Any]:
        if field is not None:
            if not isinstance(rows.dtype, pl.Struct) or field not in rows.struct.fields:
                raise _no_field(field, level, str(rows.dtype))
            _check_whole("series", level, rows.null_count())
            rows = rows.struct.field(field)
        if isinstance(rows.dtype, pl.Array):
            rows = rows.arr.to_list()
        if not isinstance(rows.dtype, pl.List):
            raise _no_lists("series", level, str(rows.dtype))
        _check_whole("series", level, rows.null_count())
        lengths = rows.list.len()
        # An empty list would become a null.
        return lengths.to_numpy().astype(np.int64), rows.filter(lengths > 0).explode()

    return _from_lists(series, levels, fields, step, device)


def _from_lists(
    rows: Any,
    levels: Sequence[str],
    fields: Mapping[str, str] | None,
    step: Step,
    device: torch.device | str | None,
) -> BroadcastTree:
    if not levels:
        raise TreeError("levels", "must name at least one level", "none")
    fields = fields or {}
    for level in fields:
        if level not in levels[1:]:
            rule = f"must name levels below the root: {list(levels[1:])}"
            raise TreeError("fields", rule, repr(level))
    root_rows, counts = len(rows), {}
    for level in levels[1:]:
        counts[level], rows = step(rows, level, fields.get(level))
    return BroadcastTree.from_counts(counts, root=levels[0], root_rows=root_rows, device=device)


def _check_whole(argument: str, level: str, missing: int) -> None:
    if missing:
        rule = f"must have a list in every row above level {level!r} (an empty one for no children)"
        raise TreeError(argument, rule, f"{missing} nulls")


def _no_lists(argument: str, level: str, kind: str) -> TreeError:
    return TreeError(argument, f"must hold lists, the rows of level {level!r}", kind)


def _no_field(field: str, level: str, kind: str) -> TreeError:
    argument = f'fields["{level}"]'
    return TreeError(argument, "must be a field of the rows above", f"{field!r} in {kind}")
