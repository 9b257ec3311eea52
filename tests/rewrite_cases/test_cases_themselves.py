"""The micro-models run, repeat themselves, can be captured, and could notice a wrong rewrite."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from rewrite_cases import all_cases
from rewrite_cases.chosen import chosen
from rewrite_cases.exporting import capture
from rewrite_cases.rows_seen import RowsSeen, unmet
from rewrite_cases.trees import DISTINCT, EXAMPLE, SIZES

CASES = all_cases()
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LARGE = SIZES[-1]

# Ops of these run for users in the original too: a rewrite must leave them there.
COARSE_ALREADY = {
    "elementwise.vendor_with_user",
    "reductions.user_rows_first",
    "attention.sdpa_keys_of_item",
    "embeddings.vocabulary_of_user",
    "gathers.repeat_inside_user",
    "mixing.users_summed",
    "mixing.users_cumsum",
    "traps.no_broadcast",
    "traps.returns_user_level",
}
# Inputs that a result does not depend on, which is what these are about.
NO_MATTER = {
    ("reductions.any_of_rows", "idx"),
    ("traps.rows_times", "i"),
    ("traps.ratio_of_sizes", "i"),
    ("traps.ones_like_item", "i"),
    ("traps.no_broadcast", "idx"),
    ("traps.map_unused", "idx"),
    ("traps.unused_input", "u2"),
}


def run(case, inputs):
    """The leaves of what a fresh copy of the model makes of fresh copies of its inputs."""
    with torch.no_grad():
        return tree_leaves(case.module()(**{name: x.clone() for name, x in inputs.items()}))


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def flat_inputs(case, size, seed=0):
    tree = size.tree(case.depth)
    return case.flat(case.inputs(tree, seed), tree)


def test_there_are_many_and_their_names_are_unique():
    assert len(CASES) >= 170
    assert len({case.name for case in CASES}) == len(CASES)


def test_sizes_are_what_their_names_say():
    rows = {s.name: [s.tree(3).rows(level) for level in s.tree(3).levels] for s in SIZES}
    assert len(rows) == 7
    assert rows["one_of_each"] == [1, 1, 1]
    assert rows["example"] == [3, 5, 11]
    assert rows["equal_sizes"] == [4, 4, 4]
    assert rows["wide"] == [2, 3, 40]
    assert rows["ratio_one"] == [7, 7, 7]
    for size in (*SIZES, DISTINCT):
        below, direct = size.tree(3), size.tree(2)
        index = below.ancestors("item", of="user")
        assert torch.equal(index, direct.ancestors("item", of="user"))
    childless = next(s for s in SIZES if s.name == "childless").tree(2)
    assert (childless.offsets("item", of="user").diff() == 0).sum() == 3


@every_case
def test_widths_are_no_row_counts_of_the_example(case):
    """Capture must not be able to take a width for a batch."""
    widths = {n for x in flat_inputs(case, EXAMPLE).values() for n in x.shape[1:]}
    widths |= {n for p in case.module().parameters() for n in p.shape}
    assert not widths & {3, 5, 11}


@every_case
def test_runs_and_repeats_itself_on_every_size(case):
    """Finite, so that no NaN hides a wrong value; models that draw numbers are to be refused."""
    for size in SIZES:
        inputs = flat_inputs(case, size)
        assert all(map(torch.equal, flat_inputs(case, size).values(), inputs.values())) or (
            "u_nan" in inputs
        )
        first = run(case, inputs)
        assert first
        if case.refused is None:
            assert same(first, run(case, inputs)), size.name
            assert all(x.isfinite().all() for x in first), size.name


@every_case
def test_every_input_matters(case):
    """Another map, other counts or other features give another result: a mistake would show."""
    if case.refused is not None or case.name == "traps.bad_ids_without_items":
        pytest.skip("has no other valid inputs to compare")
    tree = LARGE.tree(case.depth)
    inputs, others = flat_inputs(case, LARGE), flat_inputs(case, LARGE, seed=1)
    expected = run(case, inputs)
    for name in inputs:
        if (case.name, name) in NO_MATTER:
            continue
        other = others[name]
        if name in case.broadcasts:
            other = (inputs[name] + 1) % tree.rows(case.broadcasts[name][1])
        elif name in case.counts:
            other = inputs[name].flip(0)
        assert not same(run(case, inputs | {name: other}), expected), name


@every_case
def test_the_original_shows_other_row_counts_than_asked_of_the_rewrite(case):
    """What must be kept is there, and what must sink has not sunk: both demands can fail."""
    tree = DISTINCT.tree(case.depth)
    model, inputs = case.module(), flat_inputs(case, DISTINCT)
    rows = {level: tree.rows(level) for level in tree.levels}
    with torch.inference_mode(), RowsSeen(rows) as seen:
        model(**inputs)
    assert unmet(replace(case, sunk=None, split=(), limit=None), seen) == []
    sinking = replace(case, kept=())
    demands = bool(case.sunk or case.split or case.limit)
    assert bool(unmet(sinking, seen)) == (demands and case.name not in COARSE_ALREADY)


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(case.name for case in CASES))
def test_exports_with_one_named_dimension_a_level(name):
    """And the captured program, for other seeds and sizes, gives what the model gives."""
    case = next(case for case in CASES if case.name == name)
    tree = EXAMPLE.tree(case.depth)
    inputs = flat_inputs(case, EXAMPLE)
    if case.not_exportable:
        with pytest.raises(Exception, match=case.not_exportable):
            capture(case, inputs, tree)
        return
    program = capture(case, inputs, tree).module()
    if case.refused is not None:
        return
    for size in (SIZES[0], LARGE):
        if size is SIZES[0] and case.name == "gathers.repeat_counts_measured":
            continue  # torch.export asserts two rows or more where a size depends on values
        other = flat_inputs(case, size, seed=1)
        with torch.no_grad():
            found = tree_leaves(program(**other))
        for x, y in zip(found, run(case, other), strict=True):
            torch.testing.assert_close(x, y)
