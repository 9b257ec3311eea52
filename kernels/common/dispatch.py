"""Which implementation runs a call: an explicit name, the context's, or the best that supports it.

Names: `reference` (broadcast, then the flat op), `torch` (broadcast-free, plain PyTorch), `triton`,
`gluon` (Hopper). An explicitly chosen implementation that cannot take a call raises; only `auto`
passes on to the next. The choice looks at dtypes, widths and device, never at row counts, so that
it is the same for every batch (contract 4).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from ikbo_tree.kernels.common.errors import UnsupportedError

NAMES = ("auto", "reference", "torch", "triton", "gluon")

_active: ContextVar[str] = ContextVar("ikbo_tree_implementation", default="auto")


def checked_name(impl: str) -> str:
    """`impl`, if it is one of `NAMES`; a ValueError that lists them otherwise."""
    if impl not in NAMES:
        raise ValueError(f"impl must be one of {', '.join(NAMES)}; got {impl!r}")
    return impl


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Chooses the implementation of every op called inside with `impl="auto"`.

    Holds for this thread or task only. An op's own `impl=` wins. Compiled and exported programs
    read it when they run, not when they are traced.

    Args:
        name: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`, `"gluon"`.

    Raises:
        ValueError: for any other name.
    """
    token = _active.set(checked_name(name))
    try:
        yield
    finally:
        _active.reset(token)


def in_force(impl: str) -> str:
    """`impl`, or the context's choice where `impl` is `"auto"`."""
    return _active.get() if impl == "auto" else impl


class Implementations:
    """The implementations of one op; their modules are imported at first use.

    A module has `forward` and `backward` with the op's arguments, and may have
    `unsupported(device, *args) -> str | None`: the reason why it cannot take a call, asked with the
    arguments of `forward` (less `impl`).

    Args:
        op: the op's name, for error messages.
        package: the op's package, `__package__` of its `op.py`.
        modules: module name in the package for each implementation's name.
        automatic: for a device type, what `auto` tries, best first; `"default"` serves the rest.
    """

    def __init__(
        self,
        op: str,
        package: str,
        modules: Mapping[str, str] | None = None,
        automatic: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.op = op
        self._package = package
        self._modules = dict(modules or {"reference": "reference", "torch": "torch_impl"})
        self._automatic = dict(automatic or {"default": ("torch",)})

    def choose(self, impl: str, device: torch.device, *args: Any) -> ModuleType:
        """The module that runs this call.

        Raises:
            UnsupportedError: an explicit `impl` cannot take it, or none can.
        """
        impl = in_force(checked_name(impl))
        if impl != "auto":
            module, reason = self._load(impl, device, args)
            if module is None:
                raise UnsupportedError(impl, self.op, reason)
            return module
        order = self._automatic.get(device.type, self._automatic["default"])
        reasons = []
        for name in order:
            module, reason = self._load(name, device, args)
            if module is not None:
                return module
            reasons.append(f"{name}: {reason}")
        raise UnsupportedError("auto", self.op, "; ".join(reasons))

    def _load(
        self, name: str, device: torch.device, args: tuple[Any, ...]
    ) -> tuple[ModuleType | None, str]:
        if name not in self._modules:
            return None, "it has no such implementation"
        try:
            module = importlib.import_module(f"{self._package}.{self._modules[name]}")
        except ModuleNotFoundError as error:
            if error.name not in ("triton", "triton.experimental"):
                raise
            return None, "Triton is not installed (pip install triton)"
        unsupported = getattr(module, "unsupported", None)
        reason = unsupported(device, *args) if unsupported is not None else None
        return (module, "") if reason is None else (None, reason)
