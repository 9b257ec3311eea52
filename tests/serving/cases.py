"""A small model whose scores are integers, so that they can be told from wrong ones exactly."""

import threading
import time
from dataclasses import replace

import numpy as np
import torch

import ikbo_tree as ikbo
from ikbo_tree.serving import Coarse, GraphRunner, Input, Request, Signature, Staged

WORDS = 10
CAPACITY = {"user": 4, "vendor": 12, "item": 24}
SIGNATURE = Signature(
    "user",
    {"vendor": "user", "item": "vendor"},
    {
        "user_x": Input("person", shape=(3,)),
        "vendor_x": Input("vendor", shape=(2,)),
        "item_x": Input("item", shape=(2,)),
        "word": Input("item", torch.int64, bounds=(0, WORDS - 1)),
    },
    "item",
    tables={"person": "user"},
    independent=True,
)


class Toy(torch.nn.Module):
    """Integers in, integers out: every sum is exact in float32."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, 1)
        with torch.no_grad():
            self.words.weight.copy_(torch.arange(WORDS)[:, None] * 100.0)

    def forward(self, tree, user_x, vendor_x, item_x, word):
        x = {"person": torch.relu(user_x), "vendor": vendor_x, "item": item_x}
        w = {
            name: torch.arange(1.0, 1 + v.shape[1], device=v.device)[None] for name, v in x.items()
        }
        return (ikbo.linear(x, w, tree=tree) + self.words(word)).squeeze(1)


class Weighed(torch.nn.Module):
    """The toy's work on users; notes how many rows it was run on at each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, user_x):
        if not torch.compiler.is_compiling():  # nor exported, for that many rows alone
            self.calls.append(len(user_x))
        return {"user_y": torch.relu(user_x) * torch.arange(1.0, 4, device=user_x.device)}


class Rest(Toy):
    """The toy's work on everything else."""

    def forward(self, tree, user_y, vendor_x, item_x, word):
        w = torch.arange(1.0, 3, device=user_y.device)[None]
        weights = {"person": torch.ones_like(user_y[:1]), "vendor": w, "item": w}
        x = {"person": user_y, "vendor": vendor_x, "item": item_x}
        return (ikbo.linear(x, weights, tree=tree) + self.words(word)).squeeze(1)


STAGED = replace(
    SIGNATURE,
    coarse={"person": Coarse(("user_x",), {"user_y": Input("person", shape=(3,))})},
)


def staged():
    """The toy in parts; `oracle` holds for it, too."""
    return Staged(Rest(), {"person": Weighed()}, STAGED).eval()


class Peers(torch.nn.Module):
    """A score depends on the other items of the user: their sum."""

    def forward(self, tree, user_x, vendor_x, item_x, word):
        total = ikbo.reduce(item_x, tree=tree, level="item", to="user", op="sum")
        return ikbo.broadcast(total, tree=tree, level="user", to="item")[:, 0] + word


def request(seed, *, users=1, vendors=3, items=4, key=None):
    """Random integers; vendors and items may be missing below a row."""
    rng = np.random.default_rng(seed)
    vendor = rng.integers(1, vendors + 1, users)
    item = rng.integers(0, items + 1, vendor.sum())
    sizes = {"person": users, "vendor": int(vendor.sum()), "item": int(item.sum())}
    inputs = {
        name: torch.from_numpy(rng.integers(-9, 10, (sizes[given.at], *given.shape))).float()
        for name, given in SIGNATURE.inputs.items()
        if name != "word"
    }
    inputs["word"] = torch.from_numpy(rng.integers(0, WORDS, sizes["item"]))
    keys = {} if key is None else {"user": [key] * users}
    return Request({"vendor": vendor, "item": item}, inputs, keys=keys)


def known(seed, key, version, **sizes):
    """A request of one user, or of several, whose features follow from key and version."""
    keys = [key] if np.isscalar(key) else [*key]
    versions = [version] * len(keys)
    features = [np.random.default_rng([k, version]).integers(-9, 10, 3) for k in keys]
    asked = request(seed, users=len(keys), **sizes)
    inputs = {**asked.inputs, "user_x": torch.from_numpy(np.stack(features)).float()}
    return replace(asked, inputs=inputs, keys={"user": keys}, versions={"user": versions})


def oracle(asked, model="toy"):
    """Scores by loops over the request's own rows."""
    x = {name: np.asarray(value).astype(np.float64) for name, value in asked.inputs.items()}
    vendor = item = 0
    scores = []
    for user, vendors in enumerate(np.asarray(asked.counts["vendor"]).tolist()):
        first = item
        for _ in range(vendors):
            for _ in range(int(np.asarray(asked.counts["item"])[vendor])):
                score = x["item_x"][item] @ [1, 2] + x["vendor_x"][vendor] @ [1, 2]
                score += np.maximum(x["user_x"][user], 0) @ [1, 2, 3] + 100 * x["word"][item]
                scores.append(score)
                item += 1
            vendor += 1
        if model == "peers":
            scores[first:] = [x["item_x"][first:item, 0].sum() + w for w in x["word"][first:item]]
    return np.array(scores)


def runner(model=None, signature=SIGNATURE, capacity=CAPACITY, **options):
    return GraphRunner(model or Toy().eval(), signature, capacity, **options)


class Held:
    """A runner whose runs wait until they may go; `on_run` sees every batch first."""

    def __init__(self, inner=None, on_run=lambda merged: None):
        self.inner, self.on_run = inner or runner(), on_run
        self.signature, self.capacity = self.inner.signature, self.inner.capacity
        self.go, self.entered, self.batches = threading.Event(), threading.Event(), []

    def run(self, merged):
        self.entered.set()
        assert self.go.wait(20)
        self.batches.append(len(merged.parts))
        self.on_run(merged)
        return self.inner.run(merged)

    def check(self):
        self.inner.check()


def until(condition, seconds=10.0):
    """Waits for a condition that another thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)
