"""Every micro-model rewritten: the same numbers on seven sizes, from no more rows than it takes."""

import functools

import pytest
import torch
from rewrite_cases import all_cases
from rewrite_cases.chosen import chosen
from rewrite_cases.rows_seen import RowsSeen, unmet
from rewrite_cases.trees import DISTINCT, EXAMPLE, SIZES
from torch.utils._pytree import tree_flatten

import ikbo_tree as ikbo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not callable(getattr(ikbo, "rewrite", None)), reason="no rewrite yet"),
]

LIMITS = {
    "attention by hand": ("attention.hand",),
    "vectors of features beside a concatenation": (
        "concatenations.scaled_between", "concatenations.batch_norm_between",
        "concatenations.column_stack", "concatenations.tokens_over", "concatenations.einsum",
    ),
    "no rule for the op": (
        "reductions.instance_norm", "matmuls.addmm_scaled", "matmuls.baddbmm",
        "matmuls.tensordot", "matmuls.bilinear_same", "matmuls.einsum_weights_3",
        "matmuls.einsum_implicit", "embeddings.bag_weighted",
    ),
    "maps that are not plain vectors": (
        "gathers.gather", "gathers.map_from_column", "gathers.repeat_row_numbers",
    ),
}  # fmt: skip
"""What the pass leaves on fine rows for now, by prefixes of names; the numbers are right."""

CASES = {case.name: case for case in all_cases()}
REFUSED = [name for name, case in CASES.items() if case.refused]
DISAGREEING = [name for name, case in CASES.items() if case.disagrees]
REWRITTEN = chosen(n for n, case in CASES.items() if not case.refused and not case.disagrees)
COUNTED = [
    name
    for name in REWRITTEN
    if CASES[name].sunk or CASES[name].split or CASES[name].kept or CASES[name].limit
]


def limited(names):
    """The cases, those within the limits of the pass marked."""
    for name in names:
        found = [why for why, known in LIMITS.items() if name.startswith(known)]
        marks = [pytest.mark.xfail(reason=found[0], raises=AssertionError)] if found else []
        yield pytest.param(name, marks=marks)


def in_float64(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def inputs_of(case, size, seed):
    """Inputs of the rewritten model and of the original, float64, and their tree."""
    tree = size.tree(case.depth)
    own = in_float64(case.inputs(tree, seed))
    return own, case.flat(own, tree), tree


def rewrite(case):
    _, flat, _ = inputs_of(case, EXAMPLE, 0)
    return ikbo.rewrite(
        case.module().double(),
        flat,
        levels=case.levels,
        broadcasts=case.broadcasts,
        counts=case.counts,
        compact=case.compact,
        profit=False,  # all rules, though sizes are small
        check_seconds=0,  # these tests compare by themselves
    )


@functools.cache
def rewritten(name):
    """The rewritten model, made once; None where torch.export and so the rewrite refuse it."""
    case = CASES[name]
    if case.not_exportable:
        try:
            return rewrite(case)[0]
        except ikbo.UnsupportedError:
            return None
    return rewrite(case)[0]


def run(fast, case, own, tree):
    """Its signature is the original's, but for a tree where inputs are no longer broadcast."""
    copies = {name: x.clone() for name, x in own.items()}
    with torch.inference_mode():
        return fast(**copies, tree=tree) if case.compact else fast(**copies)


@pytest.mark.parametrize("name", REWRITTEN)
def test_same_result_on_every_size(name):
    case = CASES[name]
    fast = rewritten(name)
    if fast is None:
        pytest.skip("refused, as torch.export refuses it")
    for seed, size in enumerate(SIZES, start=1):
        own, flat, tree = inputs_of(case, size, seed)
        with torch.inference_mode():
            expected, shape = tree_flatten(case.module().double()(**flat))
        found, found_shape = tree_flatten(run(fast, case, own, tree))
        assert found_shape == shape
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(
                x, y, rtol=1e-9, atol=1e-9, msg=lambda text, at=size.name: f"{at}: {text}"
            )


@pytest.mark.parametrize("name", limited(COUNTED))
def test_rows_are_those_of_the_coarsest_level(name):
    case = CASES[name]
    fast = rewritten(name)
    if fast is None:
        pytest.skip("refused, as torch.export refuses it")
    own, _, tree = inputs_of(case, DISTINCT, 0)
    with RowsSeen({level: tree.rows(level) for level in tree.levels}) as seen:
        run(fast, case, own, tree)
    missing = unmet(case, seen)
    assert not missing, "; ".join(missing)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_why(name):
    case = CASES[name]
    with pytest.raises(ikbo.UnsupportedError, match=f"(?i){case.refused}"):
        rewrite(case)


@pytest.mark.parametrize("name", DISAGREEING)
def test_maps_that_should_be_equal_are_compared(name):
    """On real maps, at every call: one order of the items, then two."""
    case = CASES[name]
    fast = rewritten(name)
    own, _, tree = inputs_of(case, EXAMPLE, 1)
    with pytest.raises(RuntimeError, match=case.disagrees):
        run(fast, case, own, tree)
    equal = own | {"any_idx": own["idx"]}
    torch.testing.assert_close(run(fast, case, equal, tree), case.module().double()(**equal))


def test_writes_to_an_input_are_never_seen_by_the_caller():
    """Rewriting runs the model on example inputs; those of the caller stay as they are."""
    case = CASES["traps.add_in_place"]
    _, flat, _ = inputs_of(case, EXAMPLE, 0)
    before = {name: x.clone() for name, x in flat.items()}
    ikbo.rewrite(case.module().double(), flat, levels=case.levels, broadcasts=case.broadcasts)
    assert all(torch.equal(x, before[name]) for name, x in flat.items())
