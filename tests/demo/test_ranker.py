"""The flat and the tree ranker mean the same, shown by a loop over single candidates."""

import numpy as np
import pytest
import torch

import ikbo_tree as ikbo
from ikbo_tree.demo.ranker import FlatRanker, LevelInputs, LevelSizes, RankerSizes, TreeRanker
from ikbo_tree.demo.traffic import Requests
from ikbo_tree.demo.training import loss_of
from ikbo_tree.testing.budget import assert_within_budget

TREES = {
    "user -> vendor -> item": ikbo.BroadcastTree.from_counts(
        {"vendor": [2, 0, 3], "item": [3, 0, 1, 5, 2]}, root="user"
    ),
    "unsorted": ikbo.BroadcastTree.from_parents(
        {"vendor": [2, 0, 2, 1], "item": [3, 0, 3, 1, 0, 2]}, root="user", root_rows=3
    ),
    "one level": ikbo.BroadcastTree.from_counts({}, root="item", root_rows=4),
    "a table": ikbo.BroadcastTree.from_counts({"item": [2, 3]}, root="user").with_table(
        "vendor", of="item", index=[1, 0, 1, 2, 1]
    ),
    "no candidates": ikbo.BroadcastTree.from_counts({"item": [0, 0]}, root="user"),
}


def sizes_of(names):
    return RankerSizes(
        levels={
            name: LevelSizes(features=2 + i, tokens=1 + i, history=True)
            for i, name in enumerate(names)
        },
        width=6,
        seeds=3,
        heads=2,
        head_dim=4,
        hidden=5,
    )


def requests_of(tree, dtype=torch.float64):
    """Random inputs at every level and table; histories of every length from 0 on."""
    torch.manual_seed(1)
    names = tree.chain("names", [*tree.levels, *tree.tables])
    sizes = sizes_of(names)
    inputs = {}
    for name in names:
        rows, level = tree.rows(name), sizes.levels[name]
        inputs[name] = LevelInputs(
            torch.randn(rows, level.features, dtype=dtype),
            torch.randn(rows, level.tokens, sizes.width, dtype=dtype),
            torch.randn(rows, 3, sizes.width, dtype=dtype),
            torch.arange(rows) % 4,
        )
    labels = torch.randint(2, (tree.rows(names[-1]),)).to(dtype)
    return sizes, Requests(tree, inputs, labels)


def pair(sizes):
    torch.manual_seed(2)
    flat, tree = FlatRanker(sizes).double(), TreeRanker(sizes).double()
    tree.load_state_dict(flat.state_dict())
    return flat, tree


def score_by_hand(model, tree, inputs, candidate):
    """One candidate's score from the rows above it, in float64 NumPy."""
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}
    *_, leaf = inputs
    sizes = model.sizes
    tokens, features, events = [], [], []
    for name, x in inputs.items():
        row = int(tree.ancestors(leaf, of=name)[candidate])
        tokens.append(x.tokens[row].numpy())
        features.append(x.features[row].numpy())
        for event in x.history[row, : int(x.lengths[row])].numpy():
            value = p[f"value.{name}.weight"] @ event + p[f"value.{name}.bias"]
            events.append((p[f"key.{name}.weight"] @ event, value))
    seeds = p["compress.weight"] @ np.concatenate(tokens)
    attended = np.zeros((sizes.seeds, sizes.heads, sizes.head_dim))
    for s, seed in enumerate(seeds):
        query = (p["query.weight"] @ seed).reshape(sizes.heads, sizes.head_dim)
        for h in range(sizes.heads):
            part = slice(h * sizes.head_dim, (h + 1) * sizes.head_dim)
            weights = np.array([np.exp(k[part] @ query[h] / 2) for k, _ in events])  # sqrt(4)
            for weight, (_, v) in zip(weights / weights.sum(), events, strict=True):
                attended[s, h] += weight * v[part]
    x = p["hidden.weight"] @ np.concatenate([*features, attended.reshape(-1)]) + p["hidden.bias"]
    return (p["score.weight"] @ (x / (1 + np.exp(-x))) + p["score.bias"]).item()


@pytest.mark.parametrize("name", TREES)
def test_both_rankers_score_as_by_hand(name):
    sizes, requests = requests_of(TREES[name])
    by_hand = torch.tensor(
        [
            score_by_hand(pair(sizes)[0], requests.tree, requests.inputs, i)
            for i in range(len(requests.labels))
        ],
        dtype=torch.float64,
    )
    for model in pair(sizes):
        scores = model(requests.tree, requests.inputs)
        torch.testing.assert_close(scores, by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in TREES if name != "no candidates"])
def test_gradients_of_all_parameters_are_the_same(name):
    sizes, requests = requests_of(TREES[name])
    gradients = []
    for model in pair(sizes):
        loss_of(model, requests).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(g is not None and g.abs().max() > 0 for g in gradients[0].values())
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], gradient, rtol=1e-10, atol=1e-14)


def test_float32_errs_as_much_on_the_tree_as_flat():
    sizes, exact = requests_of(TREES["user -> vendor -> item"])
    flat, tree = pair(sizes)
    oracle = flat(exact.tree, exact.inputs).detach()
    rounded = exact.to(torch.float32)
    scores = [m.float()(rounded.tree, rounded.inputs).detach() for m in (flat, tree)]
    assert scores[1].dtype == torch.float32
    assert_within_budget(scores[1], oracle, scores[0], rows=False)


def test_checkpoints_are_interchangeable():
    flat, tree = pair(sizes_of(["user", "item"]))
    assert flat.state_dict().keys() == tree.state_dict().keys()
    assert not isinstance(tree, FlatRanker)


def test_a_history_without_lengths_is_full():
    sizes, requests = requests_of(TREES["user -> vendor -> item"])
    full = {n: LevelInputs(x.features, x.tokens, x.history) for n, x in requests.inputs.items()}
    counted = {
        n: LevelInputs(x.features, x.tokens, x.history, torch.full((len(x.features),), 3))
        for n, x in requests.inputs.items()
    }
    for model in pair(sizes):
        torch.testing.assert_close(
            model(requests.tree, full), model(requests.tree, counted), rtol=1e-12, atol=1e-12
        )
