"""A model in one file, with its signature; a rewritten model is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from serving.cases import CAPACITY, SIGNATURE, Peers, Toy, oracle, request

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.serving import GraphRunner, Input, Request, Signature, TreeBatcher, load, save

EXAMPLE = request(3, users=3)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "toy.pt2"
    save(Toy().eval(), SIGNATURE, EXAMPLE, path)
    return path


def test_any_number_of_rows(file):
    model, signature = load(file)
    assert signature == SIGNATURE
    wide = {"user": 64, "vendor": 256, "item": 1024}
    for fixed in (False, True):
        with TreeBatcher(GraphRunner(model, signature, [CAPACITY, wide], fixed=fixed)) as batcher:
            for users in (1, 2, 9, 40):
                asked = request(users, users=users)
                scores = batcher.score(asked, 20)
                np.testing.assert_array_equal(scores.values.numpy(), oracle(asked))


def test_independence_is_tried(tmp_path):
    with pytest.raises(TreeError, match="independent"):
        save(Peers().eval(), SIGNATURE, EXAMPLE, tmp_path / "peers.pt2")
    truthful = replace(SIGNATURE, independent=False)
    save(Peers().eval(), truthful, EXAMPLE, tmp_path / "peers.pt2")
    model, signature = load(tmp_path / "peers.pt2")
    with TreeBatcher(GraphRunner(model, signature, CAPACITY)) as batcher:
        scores = batcher.score(request(8), 20)
    np.testing.assert_array_equal(scores.values.numpy(), oracle(request(8), "peers"))


def test_what_can_not_be_saved(tmp_path):
    path = tmp_path / "x.pt2"
    with pytest.raises(TreeError, match="two rows"):
        save(Toy().eval(), SIGNATURE, request(3), path)

    class Other(torch.nn.Module):
        def forward(self, tree, user_x):
            return user_x

    with pytest.raises(TreeError, match="arguments"):
        save(Other().eval(), SIGNATURE, EXAMPLE, path)
    assert not path.exists()


def test_a_file_without_signature(tmp_path):
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "plain.pt2")
    with pytest.raises(TreeError, match=r"serving\.save"):
        load(tmp_path / "plain.pt2")


class Flat(torch.nn.Module):
    """As anyone writes it: user features copied to the items before they come in."""

    def __init__(self):
        super().__init__()
        self.user, self.top = torch.nn.Linear(4, 8), torch.nn.Linear(8 + 3, 1)

    def forward(self, user_x, item_x):
        user = torch.relu(self.user(user_x))
        return self.top(torch.cat([user, item_x], 1)).squeeze(1)


def test_a_rewritten_model(tmp_path):
    torch.manual_seed(0)
    flat = Flat().eval()
    # Served trees have live counts, so the example must.
    tree = BroadcastTree.from_counts({"item": [3, 4]}, root="user", capacity={"user": 2, "item": 7})
    inputs = {"user_x": torch.randn(7, 4), "item_x": torch.randn(7, 3)}
    fast, _ = ikbo.rewrite(
        flat,
        inputs,
        levels={"user_x": "item", "item_x": "item"},
        compact={"user_x": "user"},
        tree=tree,
        check_seconds=0.2,
    )
    own = {"user_x": Input("user", shape=(4,)), "item_x": Input("item", shape=(3,))}
    signature = Signature("user", {"item": "user"}, own, "item", independent=True)

    def asked(users, seed):
        rng = np.random.default_rng(seed)
        counts = rng.integers(1, 5, users)
        x = {"user_x": users, "item_x": int(counts.sum())}
        made = {k: rng.normal(size=(n, *own[k].shape)).astype(np.float32) for k, n in x.items()}
        return Request({"item": counts}, made)

    save(fast, signature, asked(3, 0), tmp_path / "fast.pt2")
    model, signature = load(tmp_path / "fast.pt2")
    with TreeBatcher(GraphRunner(model, signature, {"user": 16, "item": 64})) as batcher:
        requests = [asked(1 + seed % 4, seed) for seed in range(12)]
        futures = [batcher.submit(x) for x in requests]
        for x, future in zip(requests, futures, strict=True):
            user = np.repeat(x.inputs["user_x"], x.counts["item"], 0)
            with torch.no_grad():
                expected = flat.double()(
                    torch.from_numpy(user).double(), torch.from_numpy(x.inputs["item_x"]).double()
                )
                single = flat.float()(torch.from_numpy(user), torch.from_numpy(x.inputs["item_x"]))
            from ikbo_tree.testing.budget import assert_within_budget

            got = future.result(20).values
            assert_within_budget(got, expected, single, rows=False)
