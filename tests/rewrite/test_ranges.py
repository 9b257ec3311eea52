"""Rows of each level given once: ranges of named dims, in the report, in exported programs."""

import functools
import io
import json

import numpy as np
import pytest
import torch
from models.sizes import TINY
from models.zoo import ZOO
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.rewriting import ahead

ROWS = {"user": (1, 4, 16), "vendor": (1, 8, 64), "item": (1, 64, 1024)}
NAMES = sorted(ZOO)


def deep(entry):
    return any(level == "vendor" for level in [*entry.levels.values(), *entry.compact.values()])


def tree_of(entry, users, vendors, items):
    rng = np.random.default_rng(0)

    def dealt(total, parts):
        return np.bincount(rng.integers(0, parts, total), minlength=parts)

    vendors_of = dealt(vendors, users)
    below = {"vendor": vendors_of, "item": dealt(items, vendors)}
    return BroadcastTree.from_counts(
        below if deep(entry) else {"item": dealt(items, users)}, root="user"
    )


def arguments(name, tree, seed, dtype=torch.float64):
    entry = ZOO[name]
    flat = entry.inputs(TINY[name], tree, seed, dtype)
    own = entry.compact_inputs(TINY[name], tree, seed, dtype)
    own = {n: x for n, x in own.items() if entry.takes[n].kind not in ("map", "counts")}
    return flat, {**own, "tree": tree}


@functools.cache
def rewritten(name, dtype=torch.float64):
    entry = ZOO[name]
    model = entry.build(TINY[name]).to(dtype)
    tree = tree_of(entry, 3, 5, 17)
    return model, *ikbo.rewrite(
        model,
        entry.inputs(TINY[name], tree, 0, dtype),
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=tree,
        rows={level: ROWS[level] for level in tree.levels},
        profit=False,
        check_seconds=0,
    )


def exported(name, dtype=torch.float64):
    model, fast, report = rewritten(name, dtype)
    _, own = arguments(name, tree_of(ZOO[name], 3, 5, 17), 0, dtype)
    with torch.no_grad():
        program = torch.export.export(
            fast, (), kwargs=own, dynamic_shapes=report.dynamic_shapes(), strict=False
        )
    return model, report, program


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_exported_and_reloaded_for_all_rows_of_the_ranges(name):
    model, report, program = exported(name)
    found = {(int(r.lower), int(r.upper)) for r in program.range_constraints.values()}
    wanted = {(least, most) for least, _, most in report.rows.values()}
    assert wanted <= found
    assert found - wanted <= {(least + 1, most + 1) for least, most in wanted}  # of offsets
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for seed, rows in enumerate([(1, 1, 1), (1, 2, 5), (5, 5, 5), (16, 60, 1024), (4, 9, 1)]):
        flat, own = arguments(name, tree_of(ZOO[name], *rows), seed)
        with torch.no_grad():
            torch.testing.assert_close(loaded(**own), model(**flat), rtol=1e-9, atol=1e-9)
    _, own = arguments(name, tree_of(ZOO[name], 17, 20, 40), 0)
    with pytest.raises((RuntimeError, AssertionError)):
        loaded(**own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("din", torch.float32), ("ads", torch.float32), ("wukong", torch.bfloat16)]
)
def test_compiled_ahead_of_time_for_all_rows_of_the_ranges(name, dtype, tmp_path):
    """Attention and 16-bit products, whose ops have arguments that are empty lists."""
    _, fast, _ = rewritten(name, dtype)
    _, _, program = exported(name, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    with torch.no_grad():
        run = ahead.load(ahead.package(program, tmp_path / "model.pt2"))
        for seed, rows in enumerate([(1, 1, 1), (1, 2, 5), (16, 60, 1024)]):
            _, own = arguments(name, tree_of(ZOO[name], *rows), seed, dtype)
            torch.testing.assert_close(run(**own), fast(**own), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "ads"])
def test_exported_ops_keep_their_levels(name):
    _, report, program = exported(name)
    known = {op.name: op.level for op in report.ops}
    found = [n.meta["custom"]["level"] for n in program.graph.nodes if n.meta.get("custom")]
    assert len(found) >= 0.9 * sum(level is not None for level in known.values())
    assert set(found) == {*report.given.all_levels()}


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.top = nn.Linear(6, 8), nn.Linear(8 + 4, 1)

    def forward(self, user_x, item_x, item_to_user):
        return self.top(torch.cat([self.user(user_x[item_to_user]).relu(), item_x], 1))


def small(users=3, items=7, **options):
    inputs = torch.randn(users, 6), torch.randn(items, 4), torch.arange(items) % users
    return ikbo.rewrite(
        Ranker().eval(),
        inputs,
        levels={"user_x": "user", "item_x": "item"},
        broadcasts={"item_to_user": ("item", "user")},
        check_seconds=0,
        **options,
    )


def test_ranges_are_in_the_report_for_every_op():
    _, report = small(rows={"item": (1, 64, 512), "user": (1, 2, 8)})
    assert report.rows == {"user": (1, 2, 8), "item": (1, 64, 512)}
    written = json.loads(report.to_json())
    assert written["levels"]["user"] == {"least": 1, "usual": 2, "most": 8}
    linear = next(op for op in written["ops"] if op["op"] == "aten.linear.default")
    assert (linear["level"], linear["rows"]["most"]) == ("user", 8)
    assert {op["level"] for op in written["ops"]} == {"user", "item", None}


def test_a_level_without_a_range_is_open():
    _, report = small(rows={"item": (1, 64, 512)})
    shapes = report.dynamic_shapes()
    assert shapes["item_x"][0].max == 512
    assert shapes["user_x"][0].max > 2**40
    assert shapes["item_to_user"][0] is shapes["item_x"][0]


def test_one_number_of_rows_is_static():
    fast, report = small(rows={"user": (1, 1, 1), "item": (0, 64, 512)})
    inputs = torch.randn(1, 6), torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    names = ("user_x", "item_x", "item_to_user")
    program = torch.export.export(
        fast,
        (),
        kwargs=dict(zip(names, inputs, strict=True)),
        dynamic_shapes=report.dynamic_shapes(),
        strict=False,
    )
    for items in (1, 2, 300):
        given = (inputs[0], torch.randn(items, 4), torch.zeros(items, dtype=torch.long))
        kwargs = dict(zip(names, given, strict=True))
        torch.testing.assert_close(program.module()(**kwargs), fast(**kwargs))


def test_what_pays_is_decided_on_usual_rows():
    """Not on the example's 7 items of 3 users."""
    _, few = small(rows={"user": (1, 64, 64), "item": (1, 64, 512)})
    _, many = small(rows={"user": (1, 2, 8), "item": (1, 512, 512)})
    assert few.count("sunk") == 0
    assert many.count("sunk") == 2
    assert many.before["item"].flops > 50 * 512


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"page": (1, 2, 3)}, r"rows must name levels of \['user', 'item'\]"),
        ({"user": (3, 2, 4)}, r'rows\["user"\] must be \(least, usual, most\)'),
        ({"user": (1, 2)}, r'rows\["user"\] must be \(least, usual, most\)'),
        ({"user": (1, 2.0, 3)}, r'rows\["user"\] must be \(least, usual, most\)'),
        ({"user": (-1, 2, 3)}, r'rows\["user"\] must be \(least, usual, most\)'),
    ],
)
def test_ranges_that_are_none(rows, message):
    with pytest.raises(TreeError, match=message):
        small(rows=rows)


def test_at_most_one_row_cannot_be_left_open():
    _, report = small(rows={"user": (0, 1, 1)})
    with pytest.raises(TreeError, match="must reach 2, or be one number"):
        report.dynamic_shapes()
