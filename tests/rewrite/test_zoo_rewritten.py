"""Whole ranking models rewritten: the same scores, eager, compiled, exported and reloaded."""

import functools
import io
import time

import numpy as np
import pytest
import torch
from models.sizes import SIZES, TINY
from models.zoo import ZOO
from torch.utils._pytree import tree_leaves

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree

pytestmark = pytest.mark.slow
NAMES = sorted(ZOO)


def deep(entry):
    return "vendor" in {*entry.levels.values(), *entry.compact.values()}


def tree_of(entry, users, items, seed):
    """Uneven, with users (and vendors) that have nothing below them."""
    rng = np.random.default_rng(seed)
    if not deep(entry):
        return BroadcastTree.from_counts({"item": split(rng, items, users)}, root="user")
    vendors = split(rng, max(users, 2 * users), users)
    return BroadcastTree.from_counts(
        {"vendor": vendors, "item": split(rng, items, int(vendors.sum()))}, root="user"
    )


def split(rng, total, parts):
    return np.bincount(rng.integers(0, parts, total), minlength=parts)


def one_each(entry, rows):
    counts = np.ones(rows, int)
    below = {"vendor": counts, "item": counts} if deep(entry) else {"item": counts}
    return BroadcastTree.from_counts(below, root="user")


def trees(entry):
    yield one_each(entry, 1)
    yield one_each(entry, 5)
    yield tree_of(entry, 1, 9, 0)
    yield tree_of(entry, 6, 2, 1)
    rng = np.random.default_rng(2)
    for seed in range(46):
        yield tree_of(entry, int(rng.integers(2, 9)), int(rng.integers(2, 40)), seed)


@functools.cache
def rewritten(name, profit=False):
    """All rules, or what pays on this small tree."""
    entry = ZOO[name]
    model = entry.build(TINY[name]).double()
    example = tree_of(entry, 3, 17, 0)
    return model, *ikbo.rewrite(
        model,
        entry.inputs(TINY[name], example, 0, dtype=torch.float64),
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=example if entry.compact else None,
        profit=profit,
        check_seconds=2,
    )


def arguments(name, tree, seed):
    """Inputs of the original, and of the rewritten model."""
    entry, sizes = ZOO[name], TINY[name]
    flat = entry.inputs(sizes, tree, seed, dtype=torch.float64)
    if not entry.compact:
        return flat, flat
    return flat, {**entry.compact_inputs(sizes, tree, seed, dtype=torch.float64), "tree": tree}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("profit", [False, True], ids=["everything", "what_pays"])
@pytest.mark.parametrize("name", NAMES)
def test_same_scores_on_fifty_trees(name, profit):
    model, fast, report = rewritten(name, profit)
    assert len(report.checks) >= 2
    with torch.inference_mode():
        for seed, tree in enumerate(trees(ZOO[name])):
            flat, own = arguments(name, tree, seed)
            close(fast(**own), model(**flat))


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    """One compilation serves all trees."""
    model, fast, _ = rewritten(name)
    torch._dynamo.reset()
    compiled = torch.compile(fast, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for seed in range(3):
            flat, own = arguments(name, tree_of(ZOO[name], 4 + seed, 21 + seed, seed), seed)
            close(compiled(**own), model(**flat))


@pytest.mark.parametrize("name", NAMES)
def test_exported_saved_and_loaded(name):
    model, fast, _ = rewritten(name)
    _, own = arguments(name, tree_of(ZOO[name], 4, 23, 0), 0)
    level_rows = {4, 5, 8, 9, 23}
    dynamic = {
        key: [
            {0: torch.export.Dim.AUTO} if leaf.dim() and leaf.shape[0] in level_rows else None
            for leaf in tree_leaves(value)
        ]
        for key, value in own.items()
    }
    dynamic = {k: v if isinstance(own[k], BroadcastTree) else v[0] for k, v in dynamic.items()}
    program = torch.export.export(fast, (), kwargs=own, dynamic_shapes=dynamic, strict=False)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for seed in range(3):
        flat, own = arguments(name, tree_of(ZOO[name], 4 + seed, 23 + seed, seed), seed)
        with torch.no_grad():
            close(loaded(**own), model(**flat))


@pytest.mark.parametrize("name", NAMES)
def test_state_is_the_model_s_own(name):
    model, fast, _ = rewritten(name)
    state = {key.removeprefix("program."): value for key, value in fast.state_dict().items()}
    own = model.state_dict()
    assert state
    for key, value in state.items():
        if key in own:
            assert value.data_ptr() == own[key].data_ptr()
    # Export keeps one name of a tied parameter.
    kept = {value.data_ptr() for value in state.values()}
    unused = {key for key, value in own.items() if value.data_ptr() not in kept}
    assert all("num_batches_tracked" in key for key in unused), unused


@pytest.mark.parametrize("name", ["dlrm", "ads"])
def test_rewriting_and_checking_takes_seconds(name):
    """Of the largest models, by this process's own time; the check alone has 5 s."""
    entry, sizes = ZOO[name], SIZES[name]
    counts = {"vendor": [4] * 8, "item": [2] * 32} if deep(entry) else {"item": [8] * 8}
    tree = BroadcastTree.from_counts(counts, root="user")
    model, flat = entry.build(sizes), entry.inputs(sizes, tree, 0)
    begin = time.process_time()
    _, report = ikbo.rewrite(
        model,
        flat,
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=tree if entry.compact else None,
    )
    assert time.process_time() - begin < 30
    assert len(report.checks) >= 2
