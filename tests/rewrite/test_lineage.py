"""Levels of a rewritten model's values: their rows are where the report says, and no others'.

Every micro-model is run on a tree whose row counts are primes; then the inputs of one row are
changed. A value with rows of a level may change in the rows that hang together with that one.
"""

import functools

import pytest
import torch
from models.sizes import TINY
from models.zoo import ZOO
from rewrite_cases import all_cases
from rewrite_cases.chosen import chosen
from rewrite_cases.trees import DISTINCT, EXAMPLE
from torch import fx
from torch.utils._pytree import tree_leaves

import ikbo_tree as ikbo
from ikbo_tree.rewriting.capture import _flat_names
from ikbo_tree.rewriting.lineage import Lineage, Mixture, Place, starts

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in all_cases()}
NO_MAPS = {"perm", "other", "friend", "any_idx"}
"""Inputs that lead from rows to any others."""

NAMES = chosen(
    name
    for name, case in CASES.items()
    if not (case.refused or case.disagrees or case.not_exportable)
    and not NO_MAPS & {*case.inputs(EXAMPLE.tree(case.depth), 0)}
)
ROWS_TOGETHER = {
    name
    for name in NAMES
    if name.startswith(("mixing.", "traps.mean_by", "traps.divided_by", "traps.rows_times"))
}


def rewrite(case):
    tree = EXAMPLE.tree(case.depth)
    own = {n: x.double() if x.is_floating_point() else x for n, x in case.inputs(tree, 0).items()}
    return ikbo.rewrite(
        case.module().double(),
        case.flat(own, tree),
        levels=case.levels,
        broadcasts=case.broadcasts,
        counts=case.counts,
        compact=case.compact,
        profit=False,
        check_seconds=0,
    )


class Values(fx.Interpreter):
    """Keeps every value."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)
        self.values = {}

    def run_node(self, n):
        self.values[n] = super().run_node(n)
        return self.values[n]

    def call_module(self, target, args, kwargs):
        return None


def values(fast, inputs):
    program = getattr(fast, "program", fast)
    run = Values(program)
    with torch.inference_mode():
        run.run(*tree_leaves(inputs), enable_io_processing=False)
    return run.values


def lineage(fast, report):
    graph = getattr(fast, "program", fast).graph
    nodes = zip(_flat_names(report.given.example), graph.find_nodes(op="placeholder"), strict=True)
    return Lineage(starts(report.given, dict(nodes)), report.given.all_levels()).read(graph.nodes)


def related(tree, level, other, row):
    """[rows of level] bool: above `row` of the other level, below it, or itself."""
    found = torch.zeros(tree.rows(level), dtype=torch.bool)
    at, of = tree.levels.index(level), tree.levels.index(other)
    if level == other:
        found[row] = True
    elif at > of:
        found = tree.ancestors(level, of=other) == row
    else:
        found[tree.ancestors(other, of=level)[row]] = True
    return found


def by_rows(x, place):
    outer, inner = place.merged
    rows = x.movedim(place.dim, 0)
    return rows.reshape(outer, -1, inner, *rows.shape[1:]).movedim(1, 0)


def changed(inputs, level, row, batches):
    """Of every input of a level the row has another one's values."""
    found = {}
    for name, x in inputs.items():
        if batches.get(name) == level and isinstance(x, torch.Tensor):
            found[name] = x.clone()
            found[name][row] = x[(row + 1) % len(x)]
        else:
            found[name] = x
    return found


def check(fast, report, inputs, tree):
    places = lineage(fast, report).places
    batches = {n: level for n, level in report.given.batches.items() if n in report.given.levels}
    before = values(fast, inputs)
    for level in tree.levels:
        row = tree.rows(level) // 2
        after = values(fast, changed(inputs, level, row, batches))
        for node, place in places.items():
            if not isinstance(place, Place) or not isinstance(before[node], torch.Tensor):
                continue
            old, new = (by_rows(x[node], place) for x in (before, after))
            assert old.shape[0] == tree.rows(place.level), f"{node}: {place}"
            other = ~related(tree, place.level, level, row)
            torch.testing.assert_close(
                old[other],
                new[other],
                rtol=0,
                atol=1e-9,
                equal_nan=True,
                msg=lambda t, n=node: f"{n}: {t}",
            )
    return places


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_micro_models_are_where_their_places_say(name):
    case = CASES[name]
    fast, report = rewrite(case)
    tree = DISTINCT.tree(case.depth)
    own = {n: x.double() if x.is_floating_point() else x for n, x in case.inputs(tree, 1).items()}
    if case.compact:
        own = {**own, "tree": tree}
    check(fast, report, own, tree)


@functools.cache
def of_the_zoo(name):
    entry = ZOO[name]
    levels = {*entry.levels.values(), *entry.compact.values()}
    tree = DISTINCT.tree(3 if "vendor" in levels else 2)
    fast, report = ikbo.rewrite(
        entry.build(TINY[name]).double(),
        entry.inputs(TINY[name], tree, 0, torch.float64),
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=tree,
        profit=False,
        check_seconds=0,
    )
    return fast, report, tree


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_op_of_whole_models_has_a_level(name):
    fast, report, tree = of_the_zoo(name)
    entry = ZOO[name]
    given = entry.compact_inputs(TINY[name], tree, 0, torch.float64)
    own = {n: x for n, x in given.items() if entry.takes[n].kind not in ("map", "counts")}
    places = check(fast, report, {**own, "tree": tree}, tree)
    assert not any(isinstance(x, Mixture) for x in places.values())
    sizes = {tree.rows(level) for level in tree.levels}
    seen = values(fast, {**own, "tree": tree})
    known = {op.name: op.level for op in report.ops}
    for node in seen:
        rows = [x.shape for x in tree_leaves(seen[node]) if isinstance(x, torch.Tensor)]
        if node.name in known and any(n % r == 0 for s in rows for n in s if n for r in sizes):
            assert known[node.name] is not None, node
