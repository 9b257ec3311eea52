"""Registration of ops with torch.library: one place for schema, fake kernel and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "ikbo_tree"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    name: str,
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Defines `ikbo_tree::name` and returns it.

    Args:
        name: the op's name.
        schema: arguments and results in torch's schema language, `"(Tensor x, ...) -> Tensor"`.
        forward: the eager body for every device. Must not return or alias an argument.
        fake: shapes, dtypes and strides of the results, from fake tensors.
        setup_context: `(ctx, inputs, output)`, saves what `backward` needs.
        backward: `(ctx, *grads)`, one gradient an argument. Without it, asking for a gradient
            raises: a gradient is never dropped (contract 7).
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is None:

        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError(f"{qualified} has no derivative of its own (double backward)")

    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload
