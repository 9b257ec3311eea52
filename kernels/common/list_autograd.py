"""Derivatives of ops that take lists of tensors, at a third of what torch.library's cost a call.

`torch.library.register_autograd` takes the arguments apart and puts them together again as pytrees
in every call, forward and backward: 60 microseconds with six lists. Here the op says which of its
leading arguments have derivatives, and those are passed on flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.kernels.common.library import _LIBRARY, NAMESPACE


def register(
    name: str,
    schema: str,
    forward: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    *,
    leading: int,
    setup_context: Callable[..., None],
    backward: Callable[..., Sequence[Tensor | None]],
) -> Callable[..., Tensor]:
    """Defines `ikbo_tree::name`, an op with one result, and returns it.

    Args:
        name: as in `library.register`.
        schema: likewise.
        forward: likewise.
        fake: likewise.
        leading: how many arguments have derivatives: the first ones, each a tensor, a list of
            tensors or None.
        setup_context: `(ctx, inputs, output)`, saves what `backward` needs.
        backward: `(ctx, grad, wants)`, where wants has a bool for every tensor (or None) among the
            leading arguments; the gradient of each, None where it is not wanted.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, keyset: Any, args: tuple[Any, ...], *tensors: Tensor | None
        ) -> Tensor:
            out = below(keyset, args)
            setup_context(ctx, args, out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return None, None, *backward(ctx, *grads, ctx.needs_input_grad[2:])

    def below(keyset: Any, args: tuple[Any, ...]) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        return out

    def autograd(keyset: Any, *args: Any) -> Tensor:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return below(keyset, args)
        tensors: list[Tensor | None] = []
        for argument in args[:leading]:
            if isinstance(argument, list):
                tensors += argument
            else:
                tensors.append(argument)
        out: Tensor = Derivative.apply(keyset, args, *tensors)  # type: ignore[no-untyped-call]
        return out

    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    op: Callable[..., Tensor] = overload
    return op
