"""The budget lets pass what float32 can do, and nothing that 16-bit sums or shortcuts do."""

import numpy as np
import pytest
import torch

from ikbo_tree.testing import BudgetError, assert_within_budget


def sums(dtype, rows=50, width=9, terms=200, seed=0):
    """Terms, their exact sum and a float32 evaluation of it, one term after the other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(terms, rows, width, generator=generator).to(dtype)
    serial = torch.zeros(rows, width)
    for term in x:
        serial = serial + term.float()
    return x, x.double().sum(0), serial


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_other_orders_of_summation_pass(dtype, seed):
    x, exact, serial = sums(dtype, seed=seed)
    backwards = torch.zeros_like(serial)
    for term in x.flip(0):
        backwards = backwards + term.float()
    pairwise = x.float().sum(0)
    for other in (backwards, pairwise):
        spent = assert_within_budget(other.to(dtype), exact, serial)
        assert 0 < spent.maximum <= 1
        assert 0 < spent.rms <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_kept_in_16_bits_fail(dtype):
    x, exact, serial = sums(dtype)
    kept = torch.zeros_like(x[0])
    for term in x:
        kept = kept + term
    with pytest.raises(BudgetError, match="beyond their budget"):
        assert_within_budget(kept, exact, serial)


def test_tf32_products_fail():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, 40, generator=generator) for _ in range(2))
    cut = lambda x: (x.view(torch.int32) & -(1 << 13)).view(torch.float32)  # noqa: E731
    exact = a.double() @ b.double()
    assert_within_budget(a @ b, exact, (a.unsqueeze(2) * b).sum(1))
    with pytest.raises(BudgetError):
        assert_within_budget(cut(a) @ cut(b), exact, (a.unsqueeze(2) * b).sum(1))


def test_a_second_rounding_must_be_asked_for():
    """Rounded to bfloat16 after a shift: two roundings of the same size."""
    _, exact, serial = sums(torch.bfloat16, rows=400)
    twice = (serial * 1.37).bfloat16().float().div(1.37).bfloat16()
    with pytest.raises(BudgetError):
        assert_within_budget(twice, exact, serial)
    assert_within_budget(twice, exact, serial, roundings=2.5)


def test_rows_are_judged_by_their_own_size():
    """An error that is small beside the largest row is large in a small one."""
    exact = torch.tensor([[1e6, 2e6], [1e-3, 2e-3]], dtype=torch.float64)
    wrong = exact.float()
    wrong[1] += 1e-5
    with pytest.raises(BudgetError, match="row 1"):
        assert_within_budget(wrong, exact, exact.float())
    assert_within_budget(wrong, exact, exact.float(), rows=False)


def test_exact_zero_stays_exact():
    zero = torch.zeros(3, 2, dtype=torch.float64)
    assert assert_within_budget(zero.float(), zero, zero.float()).maximum == 0
    with pytest.raises(BudgetError):
        assert_within_budget(zero.float() + 1e-30, zero, zero.float())


def test_non_finite_values_must_be_where_they_belong():
    inf, nan = float("inf"), float("nan")
    exact = torch.tensor([[1.0, -inf], [nan, inf]], dtype=torch.float64)
    assert_within_budget(exact.float(), exact, exact.float())
    for bad in (
        [[1.0, inf], [nan, inf]],
        [[1.0, -inf], [0.0, inf]],
        [[nan, -inf], [nan, inf]],
        [[1.0, -1e38], [nan, inf]],
    ):
        with pytest.raises(BudgetError, match="not finite where they should be"):
            assert_within_budget(torch.tensor(bad), exact, exact.float())


def test_an_evaluation_that_is_no_number_allows_nothing():
    exact = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(BudgetError, match="float32 evaluation of y"):
        assert_within_budget(exact.float() + 1, exact, exact.float() * torch.nan, name="y")


def test_ignored_elements_may_be_anything():
    exact = torch.ones(2, 3, dtype=torch.float64)
    got = exact.float()
    got[0, 1] = torch.nan
    ignore = np.zeros((2, 3), bool)
    ignore[0, 1] = True
    assert_within_budget(got, exact, exact.float(), ignore=ignore)
    got[1, 1] = 2.0
    with pytest.raises(BudgetError, match="row 1"):
        assert_within_budget(got, exact, exact.float(), ignore=ignore)


def test_float64_is_held_to_float64():
    x, exact, serial = sums(torch.float64)
    assert_within_budget(x.flip(0).cumsum(0)[-1], exact, serial)
    with pytest.raises(BudgetError):
        assert_within_budget(serial.double(), exact, serial)


def test_subnormal_results_have_a_step():
    exact = torch.full((4, 3), 1.4e-7, dtype=torch.float64)
    assert_within_budget(exact.half(), exact, exact.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_that_cancel(dtype):
    """With their terms known, two bfloat16 pieces a sum are good enough; one or TF32 are not."""
    exact = torch.full((5, 3), 2.0**-12, dtype=torch.float64)
    near, terms = exact.float(), torch.ones(5, 3)
    assert_within_budget((exact + 2.0**-18).to(dtype), exact, near, terms=terms)
    for bits in (9, 12):
        with pytest.raises(BudgetError):
            assert_within_budget((exact + 2.0**-bits).to(dtype), exact, near, terms=terms)
    with pytest.raises(BudgetError):
        assert_within_budget((exact + 2.0**-18).to(dtype), exact, near)
    with pytest.raises(BudgetError):  # no 16-bit matrix unit is behind a float32 result
        assert_within_budget((exact + 2.0**-18).float(), exact, near, terms=terms)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_empty_and_scalar(shape):
    x = torch.zeros(shape, dtype=torch.float64)
    assert assert_within_budget(x.float(), x, x.float()).maximum == 0


def test_other_shapes_fail():
    with pytest.raises(BudgetError, match=r"shape \(2,\), should have \(1, 2\)"):
        assert_within_budget(torch.zeros(2), torch.zeros(1, 2).double(), torch.zeros(1, 2))
