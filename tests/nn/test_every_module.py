"""What holds for each module: flat twins, hazards, AMP, compilation, checkpointing, state dicts."""

import copy
from itertools import zip_longest

import pytest
import torch
from flat_twins import compiled_once
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from ikbo_tree import BroadcastTree
from ikbo_tree.nn import (
    TreeCrossNet,
    TreeHSTU,
    TreeLinear,
    TreeLinearCompression,
    TreeMLP,
    TreeTargetAttention,
    TreeTransformerBlock,
)
from ikbo_tree.testing import with_capacity
from ikbo_tree.testing.strategies import trees
from nn.twins import EVENTS, HEADS, TWINS, WIDTH, WIDTHS, some_tree

every_module = pytest.mark.parametrize("name", TWINS)
with_parameters = pytest.mark.parametrize("name", [n for n in TWINS if n != "dot_interaction"])
uneven = trees(max_depth=3, branching=False, tables=False, capacity=False, max_rows=60)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def leaves(inputs):
    return {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in inputs.items()}


def run(twins, module, inputs, tree, context=None, seed=0):
    """Outputs, and gradients of the inputs and of the parameters, of a random sum of outputs."""
    x = leaves(inputs)
    outputs = as_tuple(twins.call(module, x, tree))
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(y.shape, generator=generator) for y in outputs]
    loss = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
    floats = {n: v for n, v in x.items() if v.requires_grad}
    known = {**floats, **dict(module.named_parameters())}
    wanted = list(known.values())
    grads = torch.autograd.grad(loss, wanted, materialize_grads=True, allow_unused=True)
    return [y.detach() for y in outputs], dict(zip(known, grads, strict=True))


@every_module
@settings(max_examples=12)
@given(tree=uneven, seed=st.integers(0, 2**16))
def test_equals_the_flat_module(name, tree, seed):
    # torch's own attention takes no empty batch.
    assume(tree.levels == ("user", "vendor", "item") and tree.rows("item"))
    torch.manual_seed(seed)
    TWINS[name].check(tree, seed)


@every_module
def test_unsorted_trees(name):
    parents = {"vendor": [1, 0, 1], "item": [2, 0, 1, 2, 0]}
    TWINS[name].check(BroadcastTree.from_parents(parents, root="user", root_rows=2))


@every_module
@pytest.mark.parametrize(
    "counts", [{"vendor": [0, 2, 0], "item": [3, 0]}, {"vendor": [0], "item": []},
               {"vendor": [], "item": []}, {"vendor": [1, 1], "item": [0, 0]}],
)  # fmt: skip
def test_childless_rows_and_no_rows(name, counts):
    """With nothing to attend to as well."""
    twins = TWINS[name]
    tree, module = BroadcastTree.from_counts(counts, root="user"), twins.make()
    inputs = twins.inputs(tree, least=0)
    outputs, grads = run(twins, module, inputs, tree)
    assert all(y.isfinite().all() for y in outputs)
    assert all(g.isfinite().all() for g in grads.values())
    if len(outputs) == 1:  # else the histories have outputs of their own
        childless = tree.offsets("item", of="user").diff() == 0
        assert (grads["user"][childless] == 0).all()


@every_module
def test_dead_rows_do_not_count(name):
    """NaN in them reaches nothing, parameters' gradients among it."""
    twins, tree = TWINS[name], some_tree()
    padded = with_capacity(tree, {"user": 2, "vendor": 1, "item": 3})
    module, inputs = twins.make(), twins.inputs(tree)
    spread = {}
    for key, x in inputs.items():
        size = padded.capacity(twins.level(key)), *x.shape[1:]
        spread[key] = torch.full(size, torch.nan if x.is_floating_point() else 99, dtype=x.dtype)
        spread[key][: len(x)] = x
    found = []
    for some, known in ((padded, spread), (tree, inputs)):
        x = leaves(known)
        outputs = as_tuple(twins.call(module, x, some))
        wanted = [v for v in x.values() if v.requires_grad] + list(module.parameters())
        grads = torch.autograd.grad(sum(y.square().sum() for y in outputs), wanted)
        found.append((outputs, grads))
    (got, grads), (sure, exact) = found
    rows = [tree.rows(level) for level in twins.outputs]
    rows += [len(x) for x in inputs.values() if x.is_floating_point()]
    for y, other, live in zip_longest((*got, *grads), (*sure, *exact), rows):
        live = len(y) if live is None else live  # a parameter
        assert (y[live:] == 0).all()
        torch.testing.assert_close(y[:live], other, rtol=1e-4, atol=1e-5)


@every_module
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_a_request_reaches_no_other(name, fault):
    twins, tree = TWINS[name], some_tree(seed=1)
    module, inputs = twins.make(), twins.inputs(tree)
    clean, grads = run(twins, module, inputs, tree)
    of_bad = {level: tree.ancestors(level, of="user") == 1 for level in tree.levels}
    spoilt = {}
    for key, x in inputs.items():
        spoilt[key] = x.clone()
        if x.is_floating_point():
            spoilt[key][of_bad[twins.level(key)]] = fault
    outputs, got = run(twins, module, spoilt, tree)
    for y, sure, level in zip(outputs, clean, twins.outputs, strict=True):
        assert y[of_bad[level]].isnan().any() or y[of_bad[level]].isinf().any()
        torch.testing.assert_close(y[~of_bad[level]], sure[~of_bad[level]])
    for key in set(grads) & set(inputs):
        kept = ~of_bad[twins.level(key)]
        torch.testing.assert_close(got[key][kept], grads[key][kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n, twins in TWINS.items() if "lengths" in twins.shapes])
def test_padding_reaches_nothing(name):
    """NaN there, not even the weights' gradients."""
    twins, tree = TWINS[name], some_tree()
    module, inputs = twins.make(), twins.inputs(tree)
    spoilt = {**inputs, "user": inputs["user"].clone()}
    for user, length in enumerate(inputs["lengths"].tolist()):
        spoilt["user"][user, length:] = torch.nan
        inputs["user"][user, length:] = 0
    outputs, grads = run(twins, module, spoilt, tree)
    exact, sure = run(twins, module, inputs, tree)
    torch.testing.assert_close(outputs, exact)
    torch.testing.assert_close(grads, sure, rtol=1e-4, atol=1e-5)


@with_parameters
def test_state_dicts_load_into_either(name):
    twins = TWINS[name]
    flat = twins.flat()
    module = twins.of(flat)
    assert list(module.state_dict()) == list(flat.state_dict())
    assert all(p is q for p, q in zip(module.parameters(), flat.parameters(), strict=True))
    again = module.to_flat()
    assert type(again) is type(flat)
    assert all(p is q for p, q in zip(again.parameters(), flat.parameters(), strict=True))
    other = twins.make(seed=1)
    other.load_state_dict(flat.state_dict())
    flat.load_state_dict(other.state_dict())
    assert all(map(torch.equal, other.parameters(), flat.parameters()))


@every_module
def test_autocast(name):
    """bfloat16 products, as in the flat module: the same dtype, and no further off than it is."""
    twins, tree = TWINS[name], some_tree(users=8)
    flat = twins.flat()
    module, inputs = twins.of(flat), twins.inputs(tree)
    rows = {key: tree.ancestors("item", of=twins.level(key)).long() for key in inputs}
    spread = {key: x[rows[key]] for key, x in inputs.items()}
    exact = as_tuple(twins.flat_call(copy.deepcopy(flat).double(), {
        key: x.double() if x.is_floating_point() else x for key, x in spread.items()
    }))  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = as_tuple(twins.flat_call(flat, spread))
        x = leaves(inputs)
        ours = as_tuple(twins.call(module, x, tree))
    for y, other, sure, level in zip(ours, theirs, exact, twins.outputs, strict=True):
        y = y[tree.ancestors("item", of=level).long()]
        if name != "cross_net" and name != "low_rank_cross_net":
            assert y.dtype == other.dtype
        allowed = 3 * (other - sure).abs().max() + 2**-8 * sure.abs().max()
        assert (y - sure).abs().max() < allowed
        assert (y - sure).abs().max() > 0
    grads = torch.autograd.grad(sum(y.float().sum() for y in ours), list(module.parameters()) or
                                [v for v in x.values() if v.requires_grad])  # fmt: skip
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@every_module
def test_compiles_in_full_and_once(name):
    twins = TWINS[name]
    module = twins.make()

    def score(x, tree):
        return as_tuple(twins.call(module, x, tree))

    for compiled, rng in compiled_once(score):
        tree = some_tree(int(rng.integers(1000)), users=int(rng.integers(3, 9)))
        inputs = twins.inputs(tree)
        x, y = leaves(inputs), leaves(inputs)
        out, exact = compiled(x, tree), score(y, tree)
        torch.testing.assert_close(out, exact)
        floats = [n for n, v in x.items() if v.requires_grad]
        for pair, known in ((out, x), (exact, y)):
            sum(part.square().sum() for part in pair).backward(
                inputs=[known[n] for n in floats] + list(module.parameters())
            )
        for n in floats:
            torch.testing.assert_close(x[n].grad, y[n].grad, rtol=1e-4, atol=1e-4)
        module.zero_grad()


@every_module
def test_activation_checkpointing(name):
    """The same gradients, and less is kept."""
    twins, tree = TWINS[name], some_tree()
    module, inputs = twins.make(), twins.inputs(tree)
    found, kept = [], []

    def keep(t):
        kept[-1] += t.numel()
        return t

    for saving in (False, True):
        x = leaves(inputs)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            if saving:
                outputs = checkpoint(twins.call, module, x, tree, use_reentrant=False)
            else:
                outputs = twins.call(module, x, tree)
        total = sum(y.square().sum() for y in as_tuple(outputs))
        wanted = [v for v in x.values() if v.requires_grad] + list(module.parameters())
        found.append(torch.autograd.grad(total, wanted))
    assert kept[1] < kept[0]
    assert all(map(torch.equal, *found))


@every_module
def test_repr_names_the_levels(name):
    text = repr(TWINS[name].make())
    if name == "dot_interaction":
        assert text == "TreeDotInteraction(self_interaction=False, order='tril')"
    elif name == "target_attention":
        assert "level=item" in text
    elif len(TWINS[name].outputs) == 2:
        assert "of=user, level=item" in text
    else:
        assert "user=5, vendor=3, item=4" in text


BLOCK = {"activation": "gelu", "of": "user", "level": "item"}
FRESH = {
    "linear": lambda: TreeLinear(WIDTHS, 6),
    "mlp": lambda: TreeMLP(WIDTHS, [7, 6, 2], torch.nn.SiLU),
    "linear_compression": lambda: TreeLinearCompression(WIDTHS, 6),
    "low_rank_cross_net": lambda: TreeCrossNet(WIDTHS, 1, rank=2),
    "target_attention": lambda: TreeTargetAttention(WIDTH, HEADS, level="item"),
    "transformer_block": lambda: TreeTransformerBlock(WIDTH, HEADS, 12, **BLOCK),
    "causal_transformer_block": lambda: TreeTransformerBlock(
        WIDTH, HEADS, 12, norm_first=True, causal=True, **BLOCK
    ),
    "hstu": lambda: TreeHSTU(WIDTH, HEADS, EVENTS, of="user", level="item"),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_new_one_is_drawn_as_the_flat_module(name):
    """The same numbers under the same seed, so the same distribution; and the same names."""
    torch.manual_seed(3)
    flat = TWINS[name].flat()
    torch.manual_seed(3)
    fresh = FRESH[name]()
    for (name, p), (other, q) in zip(
        flat.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(p, q)
