"""`self_target_attention`: values and gradients against loops, and its contracts."""

import pytest
import torch
from attention_naive import DTYPES, IMPLS, Call, check, draw, memory, queries, results, with_grads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.testing.poison import poisoned_memory
from ikbo_tree.testing.strategies import trees

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_form = pytest.mark.parametrize("form", ["whole", "padded", "packed"])


def make(tree, level, of, form, *, n=1, heads=(2, 2), widths=(8, 8), causal=False, **options):
    """A call whose own queries are NaN where nobody may read, as the keys are."""
    history = memory(tree, of, form, heads=heads, widths=widths, **options)
    dtype = history.k.dtype
    q = queries(tree, level, n, heads[0], widths[0], dtype=dtype)
    q_self = draw(*history.k.shape[:-2], heads[0], widths[0], dtype=dtype, seed=60)
    unowned = history.k.isnan().flatten(-2).any(-1)
    q_self[unowned] = torch.nan
    call = with_grads(Call(tree, level, q, [history], q_self=q_self, causal=causal))
    for name in ("o_self", "lse_self"):
        call.grads[name][unowned] = torch.nan
    return call


@st.composite
def calls(draw_):
    tree = draw_(trees(max_rows=60))
    level = draw_(st.sampled_from(tree.levels))
    at = tree.structure.position[level]
    path = [tree.levels[i] for i in (at, *tree.structure.lineage[at])]
    names = [*path, *(t for t in tree.tables if tree.table_level(t) in path)]
    return make(
        tree,
        level,
        draw_(st.sampled_from(names)),
        draw_(st.sampled_from(["whole", "padded", "packed"])),
        n=draw_(st.sampled_from([1, 3])),
        keys=draw_(st.sampled_from([0, 1, 6])),
        heads=draw_(st.sampled_from([(1, 1), (2, 2), (4, 2)])),
        widths=draw_(st.sampled_from([(8, 8), (1, 1), (5, 3)])),
        causal=draw_(st.booleans()),
        dtype=draw_(st.sampled_from(DTYPES)),
    )


@every_impl
@given(call=calls())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_against_loops(impl, call):
    with poisoned_memory():
        check(call, impl)


@every_impl
@every_form
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_histories(impl, form, causal, dtype):
    tree = BroadcastTree.from_counts({"item": [3, 0, 70, 1]}, root="user")
    options = {"keys": 37, "lengths": [37, 5, 20, 0], "dtype": dtype, "causal": causal}
    check(make(tree, "item", "user", form, heads=(2, 1), **options), impl)


@every_impl
@every_form
def test_many_small_histories(impl, form):
    """Gathered by size; a short causal history must not see what pads it."""
    counts = [1 + i % 3 for i in range(30)]
    tree = BroadcastTree.from_counts({"item": counts}, root="user")
    check(make(tree, "item", "user", form, keys=6, widths=(2, 2), causal=True), impl)


@every_impl
def test_what_nobody_owns_is_zero(impl):
    tree = BroadcastTree.from_counts({"item": [3, 2]}, root="user", capacity={"user": 4, "item": 6})
    for form in ("padded", "packed"):
        call = make(tree, "item", "user", form, keys=6, lengths=[2, 5])
        check(call, impl)
        found = results(call, impl)
        unowned = call.q_self.isnan().flatten(-2).any(-1)
        for name in ("o_self", "lse_self", "dq_self", "dk0", "dv0"):
            assert not found[name][unowned].any(), name


@every_impl
def test_nan_of_one_history_stays_there(impl):
    tree = BroadcastTree.from_counts({"item": [3, 2]}, root="user")
    call = make(tree, "item", "user", "whole", keys=20, causal=True)
    clean = results(call, impl)
    call.memories[0].k[1], call.q_self[1] = torch.nan, torch.nan
    spoiled = results(call, impl)
    for name in ("o_self", "dq_self", "dk0", "dv0"):
        assert torch.equal(spoiled[name][0], clean[name][0]), name
        assert spoiled[name][1].isnan().any(), name
    assert torch.equal(spoiled["o"][:3], clean["o"][:3])


@every_impl
@pytest.mark.parametrize("part", ["o", "o_self"])
def test_only_one_part_is_used(impl, part):
    tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
    call = make(tree, "item", "user", "padded")
    call.grads = {name: x for name, x in call.grads.items() if name == part}
    check(call, impl)


def test_shared_gradients_are_rounded_once():
    """16-bit gradients of K and V equal the rounded sum, not the sum of two rounded parts."""
    tree = BroadcastTree.from_counts({"item": [64] * 4}, root="user")
    call = make(tree, "item", "user", "whole", dtype=torch.bfloat16, keys=16)
    spent = check(call)
    assert max(spent["dk0"].rms, spent["dv0"].rms) < 1


def test_misfits_are_named():
    tree = BroadcastTree.from_counts({"item": [3, 2]}, root="user")
    q, k = draw(5, 1, 2, 8), draw(2, 4, 2, 8)

    def attend(q_self=k, of="user", **options):
        return ikbo.self_target_attention(
            q_self, q, k, k, tree=tree, level="item", of=of, **options
        )

    with pytest.raises(TreeError, match=r"q_self must have shape \(2, 4, 2, 8\)"):
        attend(draw(2, 3, 2, 8))
    with pytest.raises(TypeError, match=r"q_self must be torch\.float32"):
        attend(k.half())
    with pytest.raises(TreeError, match="of must name one of the levels"):
        attend(of="shop")
    with pytest.raises(TreeError, match=r"k must have 5 rows \(level 'item'\)"):
        attend(of="item")
    with pytest.raises(TreeError, match=r"lengths must lie in 0 \.\.\. 4"):
        attend(lengths=torch.tensor([1, 5]))
