"""How wrong a result may be: a bound that is computed from the inputs, never tuned by hand.

Contract 2: an op in any dtype may err as much as evaluations in float32 on the same (rounded)
inputs do, and then rounds once to the dtype of its output. Per output row, of the maximum and of
the root mean square over the row:

    |actual - exact|  <=  SLACK * |float32 - exact|  +  roundings * u * |exact|  +  floor

`exact` is a float64 oracle, `float32` the worst of several evaluations, u the unit roundoff of the
output dtype. SLACK is 4: the errors of two equally good evaluations differ by random factors (in
thousands of random calls of these ops, with five evaluations each, hardly one took 2), while what
the bound is to find is far outside: sums kept in bfloat16 err 2^15 times as much as in float32,
TF32 products 2^12 times. The floor, FLOOR_ULPS float32 roundings of the row's largest element, is
there because an evaluation may be exact by luck where another one is as good and rounds. Where the
terms of a sum may cancel, as in the gradient of a softmax with one weight near 1, they are what is
rounded: then `terms` takes the elements' place in the floor. A 16-bit result with known terms may
also err by PIECES of them, 2^-17: a float32 sum that 16-bit matrix units multiply goes in as two
bfloat16 pieces of 8 bits each. Next to one rounding of the result (2^-11 in float16, 2^-8 in
bfloat16) that shows only where all but 1/64 of the terms cancels. The smallest step of the dtype
counts where results are subnormal.

For a float64 result the same float32 evaluations, against the same float64 oracle, tell how the
calculation magnifies rounding: their error is scaled down to float64's. All terms count twice,
since the oracle rounds as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SLACK = 4.0
FLOOR_ULPS = 2.0
PIECES = 2.0**-17


@dataclass(frozen=True)
class Spent:
    """How much of a budget was used.

    Attributes:
        maximum: the largest ratio, over rows, of the largest error to its bound; fine up to 1.
        rms: likewise for the root mean square over a row.
        row: where the larger of the two was found.
    """

    maximum: float
    rms: float
    row: int


class BudgetError(AssertionError):
    """A result is further from the exact one than its budget allows."""


def assert_within_budget(
    actual: Tensor,
    exact64: Tensor | np.ndarray,
    float32_eval: Tensor | Sequence[Tensor],
    *,
    name: str = "result",
    roundings: float = 1.0,
    slack: float = SLACK,
    rows: bool = True,
    ignore: np.ndarray | None = None,
    terms: Tensor | None = None,
) -> Spent:
    """Raises unless `actual` is within the budget that this module describes.

    Args:
        actual: [rows, ...], the result in the dtype that it was returned in, on any device.
        exact64: the same shape, float64, from an oracle on the same inputs.
        float32_eval: the same shape, one or more float32-accumulating evaluations of the same
            inputs that do not share `actual`'s code. They may be held in float64.
        name: of the result, for messages.
        roundings: how many times a result passes through the output dtype (1: when returned).
        slack: in place of `SLACK`.
        rows: dim 0 counts rows; False: the whole tensor is one row (weights, scalars).
        ignore: bool of the same shape, true for elements that may be anything. Their exact values
            still count for how large a row is.
        terms: the same shape: the sum of the absolute values of the terms that each element is
            added up from, where they may cancel altogether. The floor is drawn from them; those
            that are not finite count as 0.

    Returns:
        How much of the budget was used.

    Raises:
        BudgetError: beyond the budget, another shape, or not the same NaN and infinities.

    >>> x = torch.tensor([0.1, 0.2, 0.3])
    >>> spent = assert_within_budget(x.sum(), x.double().sum(), x.cumsum(0)[-1], rows=False)
    >>> spent.maximum < 1
    True
    """
    got, exact = _flat(actual, rows), _flat(exact64, rows)
    if tuple(actual.shape) != tuple(exact64.shape):
        raise BudgetError(
            f"{name} has shape {tuple(actual.shape)}, should have {tuple(exact64.shape)}"
        )
    if ignore is not None:
        got = np.where(ignore.reshape(got.shape), exact, got)
    _check_non_finite(got, exact, name)
    tensors = [float32_eval] if isinstance(float32_eval, Tensor) else list(float32_eval)
    evaluations = [_flat(evaluation, rows) for evaluation in tensors]
    for evaluation in evaluations:
        _check_non_finite(evaluation, exact, f"float32 evaluation of {name}")
    size = np.where(np.isfinite(exact), np.abs(exact), 0.0)
    added = size
    floor = FLOOR_ULPS * torch.finfo(_accumulator(actual.dtype)).eps / 2
    if terms is not None:
        added = np.maximum(size, np.nan_to_num(_flat(terms, rows), nan=0.0, posinf=0.0))
        if actual.dtype.itemsize == 2:
            floor = max(floor, PIECES)
    bounds = _bounds(exact, size, floor * added, evaluations, actual.dtype, roundings, slack)
    error = _difference(got, exact)
    ratios = np.stack([_ratio(_peak(error), bounds[0]), _ratio(_rms(error), bounds[1])])
    if ratios.size == 0:
        return Spent(0.0, 0.0, 0)
    row = int(ratios.max(axis=0).argmax())
    spent = Spent(float(ratios[0].max()), float(ratios[1].max()), row)
    if max(spent.maximum, spent.rms) > 1:
        raise BudgetError(_complaint(name, got, exact, error, bounds, spent))
    return spent


def _flat(x: Tensor | np.ndarray, rows: bool) -> np.ndarray:
    """[rows, width] float64; what has no rows is one row."""
    array = x.detach().cpu().double().numpy() if isinstance(x, Tensor) else np.asarray(x, float)
    n = array.shape[0] if rows and array.ndim else 1
    return array.reshape(n, array.size // n if n else 0)


def _check_non_finite(got: np.ndarray, exact: np.ndarray, name: str) -> None:
    finite = np.isfinite(exact)
    same = np.where(finite, np.isfinite(got), (got == exact) | (np.isnan(got) & np.isnan(exact)))
    if not same.all():
        row, at = map(int, np.argwhere(~same)[0])
        raise BudgetError(
            f"{name}: {(~same).sum()} elements are not finite where they should be, or the other"
            f" way round; row {row} element {at} is {got[row, at]}, should be {exact[row, at]}"
        )


def _difference(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(exact), np.abs(got - exact), 0.0)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bounds(
    exact: np.ndarray,
    size: np.ndarray,
    floor: np.ndarray,
    evaluations: list[np.ndarray],
    dtype: torch.dtype,
    roundings: float,
    slack: float,
) -> tuple[np.ndarray, np.ndarray]:
    """[rows] bounds of the maximum and of the root mean square."""
    info = torch.finfo(dtype)
    double = dtype == torch.float64
    if double:
        slack *= info.eps / torch.finfo(torch.float32).eps
    step = info.tiny * info.eps  # of subnormal numbers
    errors = [_difference(evaluation, exact) for evaluation in evaluations]
    bounds = []
    for norm in (_peak, _rms):
        seen = np.max([norm(error) for error in errors], axis=0)
        rounding = roundings * (info.eps / 2 * norm(size) + step / 2 * (_peak(size) > 0))
        bounds.append((slack * seen + rounding + _peak(floor)) * (2 if double else 1))
    return bounds[0], bounds[1]


def _peak(x: np.ndarray) -> np.ndarray:
    peak: np.ndarray = np.max(x, axis=1, initial=0.0)
    return peak


def _rms(x: np.ndarray) -> np.ndarray:
    if x.shape[1] == 0:
        return np.zeros(x.shape[0])
    root: np.ndarray = np.sqrt(np.mean(np.square(x), axis=1))
    return root


def _ratio(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: np.ndarray = np.where(error > 0, error / bound, 0.0)
    return ratio


def _complaint(
    name: str,
    got: np.ndarray,
    exact: np.ndarray,
    error: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    spent: Spent,
) -> str:
    row = spent.row
    at = int(error[row].argmax())
    bad = int((_peak(error) > bounds[0]).sum() or (_rms(error) > bounds[1]).sum())
    return (
        f"{name}: {bad} of {len(error)} rows are beyond their budget; in row {row} the largest"
        f" error is {error[row, at]:.3e} (bound {bounds[0][row]:.3e}), the root mean square"
        f" {_rms(error)[row]:.3e} (bound {bounds[1][row]:.3e});"
        f" element {at} is {got[row, at]:.9g}, should be {exact[row, at]:.9g}"
    )
