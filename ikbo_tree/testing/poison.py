"""Memory that shows when it is read before it is written, or written where it should not be."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

CANARY_ROWS = 2
_memory: Any = torch.utils.deterministic
_CANARY = -12345.0


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills what torch.empty and its like return: NaN, an integer's largest value, True.

    Holds for allocations inside torch's own functions too. It switches torch's deterministic
    algorithms on (warnings about functions that have none are dropped), so whether a function is
    deterministic by itself must be asked elsewhere.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _memory.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    _memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _memory.fill_uninitialized_memory = before[2]


@contextlib.contextmanager
def natural_memory() -> Iterator[None]:
    """Takes `poisoned_memory` back: torch's usual algorithms and its usual empty memory."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class CanaryError(AssertionError):
    """Something wrote beside a buffer."""


@contextlib.contextmanager
def canary_rows() -> Iterator[None]:
    """Puts rows with a known value around every buffer that Python code allocates as empty.

    `torch.empty`, `torch.empty_like`, `Tensor.new_empty` and `Tensor.new_zeros` return the middle
    of a larger buffer, empty ones filled as in `poisoned_memory`. An op's launcher allocates its
    outputs so, and a kernel that writes past its tail changes a canary.

    Raises:
        CanaryError: at the end, if a canary changed.
    """
    buffers: list[tuple[Tensor, int, int]] = []
    empty, new_empty, new_zeros = torch.empty, Tensor.new_empty, Tensor.new_zeros

    def guarded(make: Callable[..., Tensor], size: tuple[int, ...], zero: bool) -> Tensor:
        width = max(1, math.prod(size[1:]))
        inside = math.prod(size)
        beside = CANARY_ROWS * width
        buffer = make(inside + 2 * beside)
        fill_value = _canary(buffer.dtype)
        buffer.fill_(fill_value)
        middle = buffer[beside : beside + inside]
        middle.fill_(0 if zero else _poison(buffer.dtype))
        buffers.append((buffer, beside, inside))
        return middle.view(size)

    def fake_empty(*size: Any, **options: Any) -> Tensor:
        shape = _shape(size, options)
        if shape is None:
            return empty(*size, **options)
        return guarded(lambda n: empty(n, **options), shape, False)

    def fake_empty_like(x: Tensor, **options: Any) -> Tensor:
        options.pop("memory_format", None)
        made = {"dtype": x.dtype, "device": x.device, **options}
        return guarded(lambda n: empty(n, **made), tuple(x.shape), False)

    def fake_new(zero: bool) -> Callable[..., Tensor]:
        make = new_zeros if zero else new_empty

        def fake(x: Tensor, *size: Any, **options: Any) -> Tensor:
            shape = _shape(size, options)
            if shape is None:
                return make(x, *size, **options)
            return guarded(lambda n: new_empty(x, n, **options), shape, zero)

        return fake

    with (
        mock.patch.object(torch, "empty", fake_empty),
        mock.patch.object(torch, "empty_like", fake_empty_like),
        mock.patch.object(Tensor, "new_empty", fake_new(False)),
        mock.patch.object(Tensor, "new_zeros", fake_new(True)),
    ):
        yield
    for buffer, beside, inside in buffers:
        around = torch.cat((buffer[:beside], buffer[beside + inside :]))
        if not bool((around == _canary(buffer.dtype)).all()):
            raise CanaryError(
                f"a buffer of {inside} elements of {buffer.dtype} was written beside its ends"
            )


def _shape(size: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, ...] | None:
    """The size asked for; None where it is not of the plain kind that gets canaries."""
    if options.get("out") is not None or options.get("pin_memory"):
        return None
    if "size" in options:
        return None
    if len(size) == 1 and not isinstance(size[0], int):
        size = tuple(size[0])
    return tuple(int(n) for n in size)


def _canary(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return _CANARY if dtype.is_floating_point else 77


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max
