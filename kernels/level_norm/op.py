"""`ikbo_tree::level_norm`: layer and RMS norm of a concatenation of levels that nobody makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ikbo_tree.kernels.common import dispatch, list_autograd
from ikbo_tree.kernels.common.library import register
from ikbo_tree.kernels.common.routes import Route

IMPLEMENTATIONS = dispatch.Implementations(
    "level_norm",
    __package__,
    {"reference": "reference", "torch": "torch_impl", "triton": "triton_kernel"},
    {"default": ("torch",)},
)


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Parts side by side, and how they are normalised.

    Attributes:
        x: n parts [rows of its level, K_p], one float dtype.
        routes: for each part the way from the result's rows to its own; None: they are the same.
        weight: [K], the sum of all K_p; None: ones.
        bias: [K]; None: zeros.
        live: [1] int32, live rows of the result; None: all are.
        eps: added to the variance or mean of squares.
        centred: whether the mean is taken away (layer norm) or not (RMS norm).
    """

    x: Sequence[Tensor]
    routes: Sequence[Route | None]
    weight: Tensor | None
    bias: Tensor | None
    live: Tensor | None
    eps: float
    centred: bool

    @staticmethod
    def of(
        x: Sequence[Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        index: Sequence[Tensor | None],
        offsets: Sequence[Tensor | None],
        order: Sequence[Tensor | None],
        live: Tensor | None,
        eps: float,
        centred: bool,
    ) -> Concatenation:
        """From the op's arguments."""
        routes = [
            None if i is None or o is None else Route(i, o, order[at], live)
            for at, (i, o) in enumerate(zip(index, offsets, strict=True))
        ]
        return Concatenation(x, routes, weight, bias, live, eps, centred)

    @property
    def rows(self) -> int:
        """Allocated rows of the result."""
        return _rows(self.x, [None if r is None else r.index for r in self.routes])

    @property
    def widths(self) -> list[int]:
        """K_p of each part."""
        return [part.shape[1] for part in self.x]


def _rows(x: Sequence[Tensor], index: Sequence[Tensor | None]) -> int:
    own = index[0]
    return x[0].shape[0] if own is None else own.shape[0]


_MAPS = "Tensor?[] index, Tensor?[] offsets, Tensor?[] order, Tensor? live, float eps, bool centred"


def _forward(x: list[Tensor], weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    *maps, impl = rest
    call = Concatenation.of(x, weight, bias, *maps)
    out: Tensor = IMPLEMENTATIONS.choose(impl, x[0].device, call).forward(call)
    return out


def _fake(
    x: list[Tensor], weight: Tensor | None, bias: Tensor | None, index: Any, *rest: Any
) -> Tensor:
    return x[0].new_empty((_rows(x, index), sum(part.shape[1] for part in x)))


def _run_backward(grad: Tensor, x: list[Tensor], weight: Tensor | None, *rest: Any) -> list[Tensor]:
    *maps, wants, impl = rest
    call = Concatenation.of(x, weight, None, *maps)
    module = IMPLEMENTATIONS.choose(impl, grad.device, call)
    found: list[Tensor] = module.backward(grad, call, wants)
    return found


def _backward_fake(
    grad: Tensor, x: list[Tensor], weight: Tensor | None, *rest: Any
) -> list[Tensor]:
    shapes = [*(part.shape for part in x), grad.shape[1:], grad.shape[1:]]
    return [x[0].new_empty(shape) for shape, want in zip(shapes, rest[-2], strict=True) if want]


level_norm_backward = register(
    "level_norm_backward",
    f"(Tensor grad, Tensor[] x, Tensor? weight, {_MAPS}, bool[] wants, str impl) -> Tensor[]",
    _run_backward,
    _backward_fake,
)
"""The gradients that `wants` names of each x, the weight and the bias. No derivative of its own."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, index, offsets, order, live, ctx.eps, ctx.centred, impl = inputs
    # Statistics are found again: a program of backward has the whole row anyway.
    ctx.save_for_backward(*x, weight, *index, *offsets, *order, live)
    ctx.impl = dispatch.in_force(impl)


def _backward(ctx: Any, grad: Tensor, wants: Sequence[bool]) -> list[Tensor | None]:
    saved, n = ctx.saved_tensors, len(wants) - 2
    x, weight, live = list(saved[:n]), saved[n], saved[-1]
    maps = [list(saved[n + 1 + i * n : n + 1 + (i + 1) * n]) for i in range(3)]
    found = iter(
        level_norm_backward(
            grad, x, weight, *maps, live, ctx.eps, ctx.centred, list(wants), ctx.impl
        )
    )
    return [next(found) if want else None for want in wants]


level_norm = list_autograd.register(
    "level_norm",
    f"(Tensor[] x, Tensor? weight, Tensor? bias, {_MAPS}, str impl) -> Tensor",
    _forward,
    _fake,
    leading=3,
    setup_context=_setup_context,
    backward=_backward,
)
"""`(x, weight, bias, index, offsets, order, live, eps, centred, impl) -> [rows, K]`: the parts side
by side, normalised. Arguments are the fields of `Concatenation`, maps with None for parts at the
result's own rows. Computed in float32 (float64 for float64), rounded once; dead rows are zero."""
