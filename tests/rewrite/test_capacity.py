"""Trees with a capacity: a rewritten model gives live rows their scores, and all others zero.

Whatever rows beyond the live ones hold: NaN, ids that no table has. One program serves all trees
of the capacity.
"""

import functools
from unittest import mock

import pytest
import torch
from models.sizes import TINY
from models.zoo import ZOO

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.rewriting.capacity import Capacity
from ikbo_tree.rewriting.errors import RewriteError

CAPACITY = {"user": 5, "vendor": 9, "item": 13}
NAMES = sorted(ZOO)


def below(deep, vendors, items):
    """Vendors of each user and items of each vendor; a tree with capacity and one without."""
    each = iter(items)
    whole = {"item": [sum(next(each) for _ in range(n)) for n in vendors]}
    counts = {"vendor": vendors, "item": items} if deep else whole
    levels = ("user", "vendor", "item") if deep else ("user", "item")
    capacity = {level: CAPACITY[level] for level in levels}
    return [
        BroadcastTree.from_counts(counts, root="user", root_rows=len(vendors), capacity=c)
        for c in (capacity, None)
    ]


SHAPES = {
    "some": ([2, 0, 1], [3, 1, 2]),
    "full": ([3, 1, 0, 3, 2], [4, 1, 3, 4, 0, 0, 0, 0, 1]),
    "one": ([1], [1]),
    "no_items": ([1, 1], [0, 0]),
    "nothing": ([], []),
    "childless_first": ([0, 1, 1], [0, 7]),
}


def deep(entry):
    return any(level == "vendor" for level in [*entry.levels.values(), *entry.compact.values()])


@functools.cache
def rewritten(name, profit=False):
    entry = ZOO[name]
    model = entry.build(TINY[name]).double()
    padded, tree = below(deep(entry), *SHAPES["some"])
    return model, *ikbo.rewrite(
        model,
        entry.inputs(TINY[name], tree, 0, torch.float64),
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=padded,
        profit=profit,
        check_seconds=0.1,
    )


def garbage(x, rows):
    """`x` with more rows, which hold what no model can read."""
    if x.is_floating_point():
        return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), torch.nan)])
    filling = True if x.dtype == torch.bool else 10**6
    return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), filling)])


def arguments(name, shape, seed=0):
    """The original's inputs, and the rewritten model's on the tree with capacity."""
    entry = ZOO[name]
    padded, tree = below(deep(entry), *SHAPES[shape])
    own = entry.compact_inputs(TINY[name], tree, seed, torch.float64)
    flat = entry.expand(own, tree)
    kept = {
        n: garbage(x, CAPACITY[entry.takes[n].level])
        for n, x in own.items()
        if entry.takes[n].kind not in ("map", "counts")
    }
    return flat, {**kept, "tree": padded}, tree.rows("item")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("profit", [False, True], ids=["everything", "what_pays"])
@pytest.mark.parametrize("name", NAMES)
def test_live_rows_have_their_scores_and_others_zero(name, profit):
    model, fast, _ = rewritten(name, profit)
    with torch.inference_mode():
        for seed, shape in enumerate(SHAPES):
            flat, own, live = arguments(name, shape, seed)
            found = fast(**own)
            assert found.shape[0] == CAPACITY["item"]
            assert torch.equal(found[live:], torch.zeros_like(found[live:])), shape
            if live:
                close(found[:live], model(**flat))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_parameters_are_those_of_live_rows(name):
    model, fast, _ = rewritten(name)
    for shape in ("some", "childless_first"):
        flat, own, live = arguments(name, shape)
        gradients = []
        for run, given in ((model, flat), (fast, own)):
            model.zero_grad()
            run(**given)[:live].square().sum().backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        close(gradients[1], gradients[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_compilation_serves_every_live_count(name):
    model, fast, _ = rewritten(name)
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fast, fullgraph=True, dynamic=False, backend=counting)
    with torch.no_grad():
        for shape in SHAPES:
            flat, own, live = arguments(name, shape)
            found = compiled(**own)
            if live:
                close(found[:live], model(**flat))
            assert not found[live:].any()
    assert len(graphs) == 1


def left_as_it_is(self, x, *args, **kwargs):
    return x


def zeros_alone(self, x, level, *, map_or_counts):
    return ENTERING(self, x, level, map_or_counts=True)


ENTERING = Capacity.entering


@pytest.mark.parametrize("method", ["entering", "leaving"])
def test_the_check_notices_spare_rows_that_count(method):
    rewritten.cache_clear()
    with (
        mock.patch.object(Capacity, method, left_as_it_is),
        pytest.raises((RewriteError, IndexError)),
    ):
        rewritten("hstu")
    rewritten.cache_clear()


def test_gradients_notice_rows_of_zeros():
    """A user without any event is NaN in a mean over events, and so would be the gradients."""
    rewritten.cache_clear()
    with mock.patch.object(Capacity, "entering", zeros_alone), pytest.raises(AssertionError):
        test_gradients_of_parameters_are_those_of_live_rows("two_tower")
    rewritten.cache_clear()
