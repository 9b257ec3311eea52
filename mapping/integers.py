"""Index data as callers give it, checked once."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ikbo_tree.mapping.errors import TreeError

Integers: TypeAlias = NDArray[np.int64] | NDArray[np.int32]

LIMIT = 2**31 - 1
"""The most rows a level may have: maps are int32."""

_INT64 = np.dtype(np.int64)
_INT32 = np.dtype(np.int32)


def as_integers(argument: str, value: Any) -> Integers:
    """`value` as a contiguous, aligned, writable array of int64 or int32.

    Args:
        argument: its name in the caller's words.
        value: a list, tuple or array of any integer dtype, byte order and strides, 1-D. No copy is
            made of an array that is fit already.

    Raises:
        TreeError: it is not 1-D, not of integers (bool, float and object are none), or an unsigned
            entry is past 2^63 - 1.
    """
    if type(value) is np.ndarray and value.ndim == 1 and value.flags.carray:
        dtype = value.dtype
        if dtype is _INT64 or dtype is _INT32:
            return value
    return _converted(argument, value)


def _converted(argument: str, value: Any) -> Integers:
    rule = "must be a 1-D array of integers"
    if isinstance(value, (str, bytes, dict, set)) or value is None:
        raise TreeError(argument, rule, type(value).__name__)
    if isinstance(value, (list, tuple)) and not value:
        return np.empty(0, dtype=_INT64)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise TreeError(argument, rule, f"{type(value).__name__} ({error})") from error
    if array.ndim != 1:
        raise TreeError(argument, rule, f"shape {list(array.shape)}")
    if array.dtype.kind not in "iu":
        raise TreeError(argument, rule, f"dtype {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        too_large = np.flatnonzero(array > np.uint64(2**63 - 1))
        if too_large.size:
            at = int(too_large[0])
            raise TreeError(argument, "must fit int64", f"{array[at]} at position {at}")
    if array.dtype == _INT32:
        return np.array(array, dtype=np.int32, order="C")
    return np.array(array, dtype=np.int64, order="C")


def as_rows(argument: str, value: Any) -> int:
    """`value` as a number of rows.

    Raises:
        TreeError: it is no integer (bool is none), negative, or past 2^31 - 1.
    """
    if type(value) is not int:
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise TreeError(argument, "must be an integer", repr(value)) from None
    if not 0 <= value <= LIMIT:
        raise TreeError(argument, "must be from 0 to 2^31 - 1", str(value))
    return int(value)


def first(mask: NDArray[np.bool_]) -> int:
    """Position of the first true entry, or -1."""
    at = int(mask.argmax()) if mask.size else 0
    return at if mask.size and mask[at] else -1
