"""How many ops of whole models run at their coarsest level, counted by the rows that they see."""

import functools

import pytest
import torch
from models.coarsest import MAP, LevelsSeen
from models.sizes import SIZES, TINY
from models.zoo import ZOO

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree

pytestmark = pytest.mark.slow

SHARE = 0.95
"""Of the ops that depend on a batch, those that must run at their coarsest level."""

TWO = BroadcastTree.from_counts({"item": [64] * 16 + [63]}, root="user")
THREE = BroadcastTree.from_counts({"vendor": [4] * 16 + [3], "item": [16] * 66 + [31]}, root="user")
"""64 items a user or so; 17 users, 67 vendors and 1,087 items, which divide no width."""


def deep(entry):
    return any(level == "vendor" for level in [*entry.levels.values(), *entry.compact.values()])


@functools.cache
def seen(name, kind):
    """The ops of the flat model, or of what a rewrite made of it."""
    entry = ZOO[name]
    sizes = SIZES[name] if kind == "what_pays" else TINY[name]
    tree = THREE if deep(entry) else TWO
    model = entry.build(sizes)
    own = entry.compact_inputs(sizes, tree, 0)
    flat = entry.expand(own, tree)
    rows = {level: tree.rows(level) for level in tree.levels}
    assert not any(n % r == 0 for p in model.parameters() for n in p.shape for r in rows.values())
    starts = {
        n: MAP if entry.takes[n].kind in ("map", "counts") else entry.takes[n].level for n in own
    }
    run, given = model, flat
    if kind != "flat":
        run, _ = ikbo.rewrite(
            model,
            flat,
            levels=entry.levels,
            broadcasts=entry.broadcasts,
            counts=entry.counts,
            compact=entry.compact,
            tree=tree if entry.compact else None,
            profit=kind == "what_pays",
            check_seconds=0,
        )
        given = {**own, "tree": tree} if entry.compact else own
    known = [(x, starts[n]) for n, x in given.items() if n != "tree"]
    known += [(x, MAP) for x in tree._fields]
    with torch.inference_mode(), LevelsSeen(rows, known) as mode:
        run(**given)
    return mode


@pytest.mark.parametrize("kind", ["everything", "what_pays"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_ops_run_at_their_coarsest_level(name, kind):
    mode = seen(name, kind)
    finer = [f"{op.name}: {op.rows} rows" for op in mode.ops if not mode.coarsest(op)]
    assert len(mode.ops) >= 15
    assert {op.depends for op in mode.ops} == set(mode.rows)
    assert mode.share() >= SHARE, finer


@pytest.mark.parametrize(("kind", "least"), [("everything", 300), ("what_pays", 300)])
def test_share_of_the_zoo(kind, least, record_property):
    modes = [seen(name, kind) for name in ZOO]
    total = sum(len(mode.ops) for mode in modes)
    coarsest = sum(mode.coarsest(op) for mode in modes for op in mode.ops)
    record_property("coarsest", coarsest)
    record_property("ops", total)
    assert total >= least
    assert coarsest / total >= SHARE, f"{coarsest} of {total}"


def test_flat_models_do_not_run_at_their_coarsest_level():
    """So that the share above means something: just over half of their ops do."""
    modes = [seen(name, "flat") for name in ZOO]
    total = sum(len(mode.ops) for mode in modes)
    coarsest = sum(mode.coarsest(op) for mode in modes for op in mode.ops)
    assert 0.4 < coarsest / total < 0.7
    assert all(mode.share() < SHARE for mode in modes if mode is not seen("din", "flat"))


def test_a_sunk_op_and_one_that_is_not():
    """One user's rows gathered before a ReLU, then after."""
    user, item, index = torch.randn(17, 4), torch.randn(1087, 4), TWO.ancestors("item", of="user")
    known = [(user, "user"), (item, "item"), (index, MAP)]
    with torch.inference_mode(), LevelsSeen({"user": 17, "item": 1087}, known) as mode:
        user[index].relu() + item
        user.relu()[index] + item
    assert [(op.name, op.depends, op.rows) for op in mode.ops] == [
        ("relu", "user", "item"),
        ("add", "item", "item"),
        ("relu", "user", "user"),
        ("add", "item", "item"),
    ]
    assert mode.share() == 0.75
