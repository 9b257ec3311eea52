"""Launches of kernels, at a fraction of what Triton's own launcher costs the host.

Triton finds out in every call what a kernel would be compiled for. Here a launch is recognised by
the same facts, read more cheaply, and goes straight to what the first such call compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from ikbo_tree.kernels.common.triton_lib import INTERPRETED

_HIP = torch.version.hip is not None
_WORD = 2**31
"""Integers from here on are 64 bits to a kernel."""

_Fact = Callable[[Any], Any]


def _integer(value: int) -> Any:
    """1 (as 2: True is 1 to a dict), a multiple of 16, or any other; and whether it has 32 bits."""
    kind = 2 if value == 1 else value % 16 == 0
    return kind, -_WORD <= value < _WORD


def _facts(value: Any) -> Any:
    """What Triton compiles for of an argument that it specialises for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if value is None or isinstance(value, (float, bool)):
        return type(value)
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, tuple):
        return tuple([_facts(entry) for entry in value])
    # A descriptor; Gluon's have a layout too.
    return value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)


def _loose(value: Any) -> Any:
    """Likewise of an argument whose value, or whose alignment, it does not look at."""
    if isinstance(value, Tensor):
        return value.dtype
    if value is None or isinstance(value, float):
        return type(value)
    return -_WORD <= value < _WORD


class _Readers(dict[int, tuple[_Fact, ...]]):
    """How to read each argument of a kernel, by its id: its hash is one of its source."""

    def of(self, kernel: Any) -> tuple[_Fact, ...]:
        """One function for each argument."""
        known = self.get(id(kernel))
        if known is None:
            loose = {*kernel.do_not_specialize, *kernel.do_not_specialize_on_alignment}
            known = tuple(_loose if name in loose else _facts for name in kernel.arg_names)
            self[id(kernel)] = known
        return known


_READERS = _Readers()


def defaults(descriptor: type) -> dict[str, Any]:
    """What a class of descriptors has where nothing is said; newer versions of Triton have more."""
    return {
        field.name: field.default
        for field in dataclasses.fields(descriptor)
        if field.default is not dataclasses.MISSING
    }


def ceil_div(a: int, b: int) -> int:
    """The least integer not below a / b; `triton.cdiv` takes microseconds on the host."""
    return -(-a // b)


_DEFAULTS = defaults(TensorDescriptor)


def described(
    base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]
) -> TensorDescriptor:
    """A descriptor, without the checks that its constructor makes in every call.

    Args:
        base: begins at a multiple of 16 bytes.
        shape: of the tensor, up to five dims.
        strides: multiples of 16 bytes; the last is 1.
        block_shape: powers of two; the last dim has 16 bytes or more.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = base, shape, strides, block_shape
    vars(made).update(_DEFAULTS)
    return made


_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, when: bool = True, **options: Any
) -> None:
    """Launches a kernel on the current device and stream.

    Kernels that only large batches need are compiled with the others, at the first batch of
    whatever size (`when`): a later, larger one never waits for the compiler (contract 7).

    Args:
        kernel: a `@triton.jit` function whose run-time arguments come first.
        grid: programs in x, y, z.
        *args: all its run-time arguments.
        when: whether there is something to do; otherwise it is compiled and not run.
        **options: all its constexpr arguments, hashable, and launch options.
    """
    if INTERPRETED:
        if when:
            kernel[grid](*args, **options)
        return
    readers = _READERS.of(kernel)
    device = _device(args)
    # Triton's AMD backend compiles for facts that are not read here.
    known = device >= 0 and not _HIP and not _watched()
    facts = [read(value) for read, value in zip(readers, args, strict=False)]
    key = (id(kernel), device, when or known, *facts, *options.values())
    compiled = _COMPILED.get(key)
    if compiled is None or (when and not known):
        run = kernel[grid] if when else functools.partial(kernel.warmup, grid=grid)
        _COMPILED[key] = run(*args, **options)
    elif when:
        constants = [options[name] for name in kernel.arg_names[len(args) :]]
        stream = torch._C._cuda_getCurrentRawStream(device)
        # As CompiledKernel's own `__getitem__` does it, less what hooks would be told.
        compiled.run(
            *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata,
            None, None, None, *args, *constants,
        )  # fmt: skip


def _watched() -> bool:
    """Whether a tool, a profiler for example, is to be told of launches."""
    runtime = knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


def _device(args: tuple[Any, ...]) -> int:
    """Number of the arguments' GPU; -1 for tensors that kernels are only compiled with."""
    for value in args:
        tensor = getattr(value, "base", value)
        if isinstance(tensor, Tensor):
            return tensor.get_device()
    raise TypeError("no argument is a tensor or a descriptor")
