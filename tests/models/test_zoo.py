"""The zoo itself: models are per row, isolated, exportable, and as large as `sizes.py` says."""

import ast
import inspect
import sys

import pytest
import torch
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

from ikbo_tree import BroadcastTree
from models.sizes import SIZES, TINY
from models.zoo import ZOO

every_model = pytest.mark.parametrize("name", ZOO)


def tree_of(vendors, items):
    """Vendors of each user, items of each vendor."""
    return BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user")


TREES = {
    "ratio_1": tree_of([1, 1, 1, 1], [1, 1, 1, 1]),
    "uneven": tree_of([2, 1, 2], [3, 1, 7, 2, 1]),
    "childless": tree_of([0, 2, 1, 0, 1], [2, 0, 3, 0]),
    "users_as_many_as_items": tree_of([0, 2, 1], [1, 2, 0]),
    "one_user": tree_of([2], [1, 3]),
    "one_row": tree_of([1], [1]),
    "two_levels": BroadcastTree.from_counts({"item": [2, 0, 3]}, root="user"),
}
CAPTURED = tree_of([1] * 16 + [3], [1] * 17 + [2, 4])
"""17 users, 19 vendors, 23 items: no row count is a width of a tiny model."""


def trees_of(name):
    three_levels = "vendor" in {given.level for given in ZOO[name].takes.values()}
    return {key: tree for key, tree in TREES.items() if key != "two_levels" or not three_levels}


every_model_and_tree = pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in ZOO for key in trees_of(name)]
)


def tiny(name, tree, dtype=torch.float64):
    """A tiny model and its inputs, each at its own level."""
    entry = ZOO[name]
    return entry.build(TINY[name]).to(dtype), entry.compact_inputs(TINY[name], tree, 1, dtype)


def perturbed(given, x, row, tree, vocabulary):
    """`x` with another value in `row`, and which items that concerns; None if there is no other."""
    level, y = given.level, x.clone()
    below = (tree.ancestors("item", of=level) if level != "item" else torch.arange(len(x))) == row
    match given.kind:
        case "floats":
            y[row] += torch.linspace(-1, 2, y[row].numel()).view_as(y[row])
        case "ids":
            y[row] = (y[row] + 1) % vocabulary
        case "lengths":
            y[row] = y[row] - 1 if y[row] > 1 else y[row] + 1
        case "mask" | "padding":
            y[row, 1:] ^= True
        case "map":
            y[row] = (y[row] + 1) % tree.rows(given.other)
        case "counts":  # the row's last child goes to the next row
            if row + 1 == len(x) or x[row] == 0:
                return None
            y[row] -= 1
            y[row + 1] += 1
            below = torch.arange(len(below)) == x[: row + 1].sum() - 1
    return None if y.equal(x) else (y, below)


@every_model_and_tree
def test_a_row_decides_on_exactly_the_items_below_it(name, key):
    entry, tree = ZOO[name], TREES[key]
    model, inputs = tiny(name, tree)
    with torch.no_grad():
        before = model(**entry.expand(inputs, tree))
        assert before.shape == (tree.rows("item"), TINY[name].tasks)
        assert before.isfinite().all()
        for changed, given in entry.takes.items():
            for row in range(len(inputs[changed])):
                found = perturbed(given, inputs[changed], row, tree, TINY[name].vocabulary)
                if found is None:
                    continue
                value, below = found
                after = model(**entry.expand({**inputs, changed: value}, tree))
                moved = (after - before).abs().amax(dim=1) > 1e-9
                assert moved.tolist() == below.tolist(), f"{changed}[{row}]"


@every_model
def test_every_input_is_perturbed_somewhere(name):
    """So that the test above says something about each of them."""
    entry, tree = ZOO[name], TREES["uneven"]
    _, inputs = tiny(name, tree)
    for changed, given in entry.takes.items():
        rows = range(len(inputs[changed]))
        args = [(given, inputs[changed], row, tree, TINY[name].vocabulary) for row in rows]
        assert any(perturbed(*arg) is not None for arg in args), changed


@every_model
def test_export_equals_eager_on_other_trees(name):
    entry = ZOO[name]
    model, _ = tiny(name, CAPTURED)
    captured = entry.inputs(TINY[name], CAPTURED, 1, torch.float64)
    dims = {level: Dim(level) for level in ("user", "vendor", "item")}
    shapes = {given: {0: dims[level]} for given, level in entry.batches.items()}
    program = torch.export.export(
        model, (), kwargs=captured, dynamic_shapes=shapes, strict=False
    ).module()
    for tree in trees_of(name).values():
        inputs = entry.inputs(TINY[name], tree, 2, torch.float64)
        torch.testing.assert_close(program(**inputs), model(**inputs), rtol=1e-12, atol=1e-12)


@every_model
def test_the_registry_describes_the_model(name):
    entry, tree = ZOO[name], TREES["uneven"]
    forward = inspect.signature(entry.model.forward).parameters
    inputs = entry.inputs(TINY[name], tree, 1)
    assert list(inputs) == list(entry.takes) == list(forward)[1:]
    assert {given: len(x) for given, x in inputs.items()} == {
        given: tree.rows(level) for given, level in entry.batches.items()
    }
    assert bool(entry.compact) != bool(entry.broadcasts or entry.counts)
    assert not entry.build(TINY[name]).training


def test_about_half_of_the_zoo_takes_broadcast_inputs():
    assert sum(entry.broadcast for entry in ZOO.values()) == 4
    assert len(ZOO) == len(SIZES) == len(TINY) == 9


@every_model
def test_models_are_standard_pytorch(name):
    tree = ast.parse(inspect.getsource(sys.modules[ZOO[name].model.__module__]))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    assert modules <= {"torch", "torch.nn.functional", "models.layers", "models.sizes"}


@every_model
def test_the_frozen_sizes_are_worth_timing(name):
    """GFLOP of the flat model for 1,024 items at 64 items a user, counted without computing."""
    entry, sizes = ZOO[name], SIZES[name]
    tree = tree_of([8] * 16, [8] * 128)
    inputs = {given: x.to("meta") for given, x in entry.inputs(sizes, tree, 1).items()}
    with torch.device("meta"):
        model = entry.model(sizes).eval()
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert 60e9 < counter.get_total_flops() < 120e9
