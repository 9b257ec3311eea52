"""Breaking any one rule of the pass is noticed by its own check.

Every rule is broken in two ways: it says the rows are in another dim, and it takes calls that it
should refuse. Which micro-models use a rule, or are refused by it, is found by listening.
"""

import functools
import zlib
from dataclasses import replace
from unittest import mock

import pytest
from rewrite_cases import all_cases
from rewrite_cases.trees import EXAMPLE

from ikbo_tree.errors import UnsupportedError
from ikbo_tree.rewriting import rowwise
from ikbo_tree.rewriting.capture import Compacted, capture
from ikbo_tree.rewriting.graph_pass import Rewriting
from ikbo_tree.rewriting.inputs import declared
from ikbo_tree.rewriting.rowwise import RULES, Rows
from ikbo_tree.rewriting.validate import validate

pytestmark = pytest.mark.slow

NAMES = sorted({rule.__name__ for rule in RULES.values()})
THREE = 3
"""So many micro-models are tried for each mutation."""


@functools.cache
def captured(name):
    """The graph of a micro-model, and its declarations; None where it is refused."""
    case = {case.name: case for case in all_cases()}[name]
    model = case.module()
    tree = EXAMPLE.tree(case.depth)
    flat = case.flat(case.inputs(tree, 0), tree)
    given = declared(model, flat, case.levels, case.broadcasts, case.counts, case.compact, None)
    if given.compact:
        model = Compacted(model, given, "item").eval()
    try:
        return capture(model, given), given
    except UnsupportedError:
        return None


def rewritten(name):
    graph, given = captured(name)
    rewriting = Rewriting(graph, given)
    rewriting.run()
    return validate(graph, rewriting.graph, rewriting.env, given, seconds=0)


def broken(rule, change):
    """The rule table with one rule changed."""
    changed = {op: change(r) if r.__name__ == rule else r for op, r in RULES.items()}
    return mock.patch.dict(rowwise.RULES, changed)


@functools.cache
def users():
    """For each rule, the micro-models that it took a call of, and those it refused one of."""
    took = {name: set() for name in NAMES}
    refused = {name: set() for name in NAMES}

    def listening(rule, case):
        def listen(call):
            found = rule(call)
            (refused if found is None else took)[rule.__name__].add(case)
            return found

        listen.__name__ = rule.__name__
        return listen

    for case in all_cases():
        # Every fourth is enough to reach all rules; the rest is in test_micro_models.
        if case.refused or case.not_exportable or zlib.crc32(case.name.encode()) % 4:
            continue
        if captured(case.name) is not None:
            with mock.patch.dict(RULES, {op: listening(r, case.name) for op, r in RULES.items()}):
                rewritten(case.name)
    return took, refused


def noticed(rule, change, cases):
    for case in sorted(cases)[:THREE]:
        with broken(rule, change):
            try:
                rewritten(case)
            except Exception:  # the check, or an op that cannot have such rows at all
                return True
    return False


def in_another_dim(rule):
    def wrong(call):
        rows = rule(call)
        out = call.out if not isinstance(call.out, (tuple, list)) else call.out[0]
        if rows is None or out.dim() < 2:
            return rows
        dims = rows.dim if isinstance(rows.dim, tuple) else (rows.dim,)
        moved = tuple(None if d is None else (d + 1) % out.dim() for d in dims)
        return replace(rows, dim=moved if isinstance(rows.dim, tuple) else moved[0])

    wrong.__name__ = rule.__name__
    return wrong


def taking_all(rule):
    def wrong(call):
        rows = rule(call)
        if rows is not None:
            return rows
        first = call.operands()[0]
        out = call.out if not isinstance(call.out, (tuple, list)) else call.out[0]
        dim = min(first.dim, max(len(out.shape) - 1, 0))
        return Rows(dim, first.merged)

    wrong.__name__ = rule.__name__
    return wrong


@pytest.mark.parametrize("rule", NAMES)
def test_rows_in_another_dim_are_noticed(rule):
    took, _ = users()
    if not took[rule]:
        pytest.skip("no micro-model of this quarter uses it")
    assert noticed(rule, in_another_dim, took[rule])


@pytest.mark.parametrize("rule", NAMES)
def test_taking_what_must_be_refused_is_noticed(rule):
    _, refused = users()
    if not refused[rule]:
        pytest.skip("refuses none of these micro-models")
    assert noticed(rule, taking_all, refused[rule])
