"""`check_op` passes what is right and finds every kind of planted fault."""

import dataclasses
from unittest import mock

import pytest
import torch
from planted_faults import FAULTS, planted

from ikbo_tree import BroadcastTree
from ikbo_tree.testing import CheckError, check_op, tree_code
from ikbo_tree.testing.cases import CASES
from ikbo_tree.testing.fuzzing import find_failure

TREES = {
    "ragged": BroadcastTree.from_counts({"item": [70, 0, 3, 1, 300]}, root="user"),
    "dead rows": BroadcastTree.from_counts(
        {"item": [70, 0, 3, 1, 300]}, root="user", capacity={"user": 7, "item": 380}
    ),
    "unsorted": BroadcastTree.from_parents({"item": [1, 0, 1, 0, 3, 1]}, root="user", root_rows=4),
}


@pytest.fixture(autouse=True)
def register():
    with planted():
        yield


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_passes_what_is_right(tree):
    spent = check_op("nothing_wrong", tree)
    assert set(spent) == {"output 0", "gradient of x"}
    assert all(0 <= s.maximum <= 1 and 0 <= s.rms <= 1 for s in spent.values())


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "nothing_wrong"])
def test_finds_planted_faults(name):
    _, checks, dtype = FAULTS[name]
    with pytest.raises(CheckError) as caught:
        check_op(name, TREES["ragged"], dtype=dtype, seed=1)
    assert caught.value.check in checks, caught.value


@pytest.mark.parametrize(
    "name", ["dead_rows_not_zeroed", "dead_rows_read", "dead_gradient_not_zeroed"]
)
def test_finds_faults_in_a_tree_with_dead_rows_of_its_own(name):
    with pytest.raises(CheckError) as caught:
        check_op(name, TREES["dead rows"])
    assert caught.value.check == "values"


def test_error_says_how_to_run_it_again():
    with pytest.raises(CheckError) as caught:
        check_op("gradient_doubled", TREES["ragged"], seed=5, impl="torch")
    code = caught.value.code
    assert tree_code(TREES["ragged"]) in code
    with pytest.raises(CheckError) as again:
        exec(code, {})
    assert str(again.value) == str(caught.value)


def test_finds_a_small_tree():
    """A fault that needs an empty segment and at least two items."""
    failure = find_failure("empty_maximum_is_zero", examples=60, max_rows=100)
    assert failure is not None
    tree = eval(failure.code.split("tree = ")[1].splitlines()[0], {"BroadcastTree": BroadcastTree})
    assert tree.rows(tree.levels[0]) == 1
    assert sum(map(tree.rows, tree.levels)) == 1


def test_finds_nothing_where_nothing_is_wrong():
    seen = []
    found = find_failure(
        "nothing_wrong", examples=15, max_rows=50, on_example=lambda: seen.append(1)
    )
    assert found is None
    assert len(seen) >= 15


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("op", list(CASES))
def test_public_ops(op, impl):
    tree = BroadcastTree.from_counts({"vendor": [2, 0, 1], "item": [3, 0, 5]}, root="user")
    tree = tree.with_table("brand", of="vendor", index=[1, 1, 0], rows=3)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16)):
        check_op(op, tree, impl=impl, dtype=dtype, seed=seed)


@pytest.mark.parametrize(
    ("op", "seeds"),  # of calls that have something to attend to
    [
        ("target_attention", (2, 3, 4, 5)),
        ("self_target_attention", (0, 1, 4, 6)),
        ("segment_softmax", (0, 1, 5, 6)),
    ],
)
@pytest.mark.parametrize("bits", [16, 13], ids=["bfloat16", "tf32"])
def test_lost_bits_are_found_where_terms_cancel(op, seeds, bits):
    """The floor drawn from terms is no hiding place for operands cut to fewer bits."""

    def maker(tree, rng):
        call = CASES[op](tree, rng)

        def run(tree, x, impl):
            if impl == "reference":
                return call.run(tree, x, impl)
            cut = {n: (v.detach().view(torch.int32) & -(1 << bits)) for n, v in x.items()}
            moved = {n: v + (cut[n].view(torch.float32) - v).detach() for n, v in x.items()}
            return call.run(tree, moved, impl)

        return dataclasses.replace(call, run=run)

    tree = BroadcastTree.from_counts({"vendor": [2, 0, 1], "item": [3, 0, 5]}, root="user")
    with mock.patch.dict(CASES, {"lost bits": maker}):
        for seed in seeds:
            with pytest.raises(CheckError, match="beyond their budget") as caught:
                check_op("lost bits", tree, seed=seed, impl="torch")
            assert caught.value.check == "values"


def test_unknown_op():
    with pytest.raises(ValueError, match="op must be one of broadcast, reduce"):
        check_op("no such op", TREES["ragged"])
