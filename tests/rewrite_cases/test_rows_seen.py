"""The row counter, on models rewritten by hand: it tells what sank, what split and what stayed."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import ikbo_tree as ikbo
from rewrite_cases import all_cases
from rewrite_cases.rows_seen import RowsSeen, unmet
from rewrite_cases.trees import DISTINCT

CASES = {case.name: case for case in all_cases()}
TREE = DISTINCT.tree(3)
ROWS = {level: TREE.rows(level) for level in TREE.levels}
U, V, N = ROWS.values()


def seen_in(function, **inputs):
    with torch.inference_mode(), RowsSeen(ROWS) as seen:
        function(**inputs)
    return seen


def missing(name, forward):
    """What a hand-written forward of a case leaves unmet, after a check of its values."""
    case = CASES[name]
    tree = DISTINCT.tree(case.depth)
    inputs = case.inputs(tree, 0)
    model = case.module()
    with torch.inference_mode():
        torch.testing.assert_close(forward(model, **inputs), model(**case.flat(inputs, tree)))
        with RowsSeen({level: tree.rows(level) for level in tree.levels}) as seen:
            forward(model, **inputs)
    return unmet(case, seen)


def test_row_counts_are_primes_and_no_width_hides_them():
    assert [U, V, N] == [17, 37, 211]
    for case in CASES.values():
        tree = DISTINCT.tree(case.depth)
        for x in case.inputs(tree, 0).values():
            assert all(x[0].numel() % rows for rows in ROWS.values())


def test_sunk_and_not_sunk():
    assert missing("elementwise.relu", lambda m, u, i, idx: torch.relu(u)[idx] + i) == []
    (message,) = missing("elementwise.relu", lambda m, u, i, idx: torch.relu(u[idx]) + i)
    assert "aten.relu never ran at user alone" in message


def test_sunk_and_also_run_for_items():
    (message,) = missing(
        "elementwise.relu", lambda m, u, i, idx: torch.relu(u)[idx] + i + 0 * torch.relu(i)
    )
    assert message == "aten.relu ran at ['user', 'item'], not only at user"


def test_split_linear():
    def parted(m, uw, i, idx):
        w = m.f.weight
        return F.linear(uw, w[:, :24], m.f.bias)[idx] + F.linear(i, w[:, 24:])

    def whole(m, uw, i, idx):
        return m.f(torch.cat([uw[idx], i], -1))

    assert missing("concatenations.linear", parted) == []
    without, wide = missing("concatenations.linear", whole)
    assert "no part of aten.linear ran at user alone" in without
    assert wide == "a tensor holds 30 elements a row of item, not 8"


def test_linear_of_the_library_is_a_product_a_level():
    def fused(m, uw, i, idx):
        w = m.f.weight
        weights = {"user": w[:, :24], "item": w[:, 24:]}
        return ikbo.linear({"user": uw, "item": i}, weights, tree=DISTINCT.tree(2), bias=m.f.bias)

    def flat(m, uw, i, idx):
        weights = {"item": m.f.weight}
        x = {"item": torch.cat([uw[idx], i], -1)}
        return ikbo.linear(x, weights, tree=DISTINCT.tree(2), bias=m.f.bias)

    assert missing("concatenations.linear", fused) == []
    assert "no part of aten.linear ran at user alone" in missing("concatenations.linear", flat)[0]


def test_attention_of_the_library_copies_no_history():
    def tree_attention(m, hist, q, idx):
        keys = hist.view(-1, 7, 2, 4)
        out = ikbo.target_attention(
            q.view(-1, 1, 2, 4), {"user": (keys, keys)}, tree=DISTINCT.tree(2), level="item"
        )
        return out.flatten(1)

    assert missing("attention.sdpa", tree_attention) == []


def test_one_level_in_another_than_asked():
    name = "gathers.chain"
    assert missing(name, lambda m, u, v, i, vu, iv: (u.exp()[vu] + v).tanh()[iv] + i) == []
    (message,) = missing(name, lambda m, u, v, i, vu, iv: (u[vu].exp() + v).tanh()[iv] + i)
    assert message == "aten.exp never ran at user alone, but at ['vendor']"


def test_what_is_kept():
    name = "elementwise.gate"
    assert missing(name, lambda m, u, i, idx: torch.sigmoid(u)[idx] * i) == []
    case = CASES["mixing.softmax"]
    seen = seen_in(lambda u: u.softmax(0), u=torch.randn(U, 6))
    assert unmet(case, seen) == ["aten.softmax never saw rows of item, but those of ['user']"]
    assert unmet(case, seen_in(lambda u: u.softmax(0), u=torch.randn(N, 6))) == []


@pytest.mark.parametrize("shape", [(N * 4, 6), (4, N), (1, 2 * N, 7), (U, N)])
def test_merged_and_moved_rows_are_rows(shape):
    assert RowsSeen(ROWS).level_of(shape) == "item"


def test_no_rows():
    assert RowsSeen(ROWS).level_of((4, 6, 0)) is None
    assert RowsSeen(ROWS).level_of(()) is None


def test_plain_names():
    def several(x):
        y = x.clone().relu_()
        return F.softmax(y, 1), F.layer_norm(y, (6,)), y.norm(dim=1), y.square(), F.linear(y, y[:6])

    ops = {call.op for call in seen_in(several, x=torch.randn(U, 6)).calls}
    assert {"relu", "softmax", "layer_norm", "norm", "pow", "linear"} <= ops


def test_composite_ops_arrive_whole():
    """Else attention would be shredded into products whose rows say little."""
    q = torch.randn(U, 2, 7, 4)
    seen = seen_in(lambda q: F.scaled_dot_product_attention(q, q, q), q=q)
    assert [call.op for call in seen.calls] == ["scaled_dot_product_attention"]


def test_a_gather_spelt_as_embedding_is_no_look_up():
    index = torch.zeros(N, dtype=torch.long)
    rows = seen_in(lambda u, index: F.embedding(index, u), u=torch.randn(U, 6), index=index)
    table = seen_in(lambda u, index: F.embedding(index, u), u=torch.randn(10, 6), index=index)
    assert [call.op for call in (*rows.calls, *table.calls)] == ["index", "embedding"]


def test_arithmetic_is_no_move_and_no_integer():
    case = SimpleNamespace(sunk=None, split=("aten.*",), kept=(), limit=None)
    moved = seen_in(lambda u: torch.cat([u[:4], u], 0)[:U].t(), u=torch.randn(U, 6))
    counted = seen_in(lambda u: (u > 0).sum(1), u=torch.randn(U, 6))
    assert unmet(case, moved)
    assert unmet(case, counted)
    assert unmet(case, seen_in(lambda u: u * 2, u=torch.randn(U, 6))) == []
