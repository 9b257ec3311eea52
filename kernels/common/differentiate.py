"""Derivatives by torch's autograd from inside an op, for the reference implementations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_AUTOGRAD_KEYS = ("AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView")


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The gradient of every input of a differentiable function, contiguous; zeros where unused.

    torch runs an op's body with autograd switched off for its thread, and `torch.enable_grad` does
    not switch it on again. (torch.func.vjp would do, but not under a TorchDispatchMode: torch
    2.13 overflows its stack there.)

    Args:
        function: takes `inputs`, returns a tensor or a tuple of them.
        inputs: float tensors to differentiate by.
        grads: gradient of each of the function's results.
    """
    with _autograd_inside_op():
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = function(*leaves)
        if isinstance(results, Tensor):
            results = (results,)
        pairs = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad]
        outs, cotangents = [y for y, _ in pairs], [g for _, g in pairs]
        if not outs:
            return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
        found = torch.autograd.grad(
            outs, leaves, cotangents, allow_unused=True, materialize_grads=True
        )
    return tuple(x.contiguous() for x in found)


@contextlib.contextmanager
def _autograd_inside_op() -> Iterator[None]:
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        excluded = excluded - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
