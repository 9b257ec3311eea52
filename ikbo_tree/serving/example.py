"""The demo's ranker as a served model, and its generated traffic as requests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import ikbo_tree as ikbo
from ikbo_tree.demo.ranker import FlatRanker, LevelInputs, RankerSizes, TreeRanker
from ikbo_tree.demo.traffic import SIZES, Requests, Traffic
from ikbo_tree.serving.coarse import Staged
from ikbo_tree.serving.request import Request
from ikbo_tree.serving.signature import Coarse, Input, Signature

TABLE = "user_row"
"""The table of distinct users; vendors are rows as one user knows them, and stay a level."""
SCALES = {
    "small": SIZES,
    "large": replace(SIZES, seeds=16, heads=4, head_dim=32, hidden=256),
}
"""Rankers with the same inputs: the demo's, and one whose own work outweighs a server's."""


def signature(
    sizes: RankerSizes = SIZES, *, user_events: int = 64, vendor_events: int = 16
) -> Signature:
    """How `RankerScorer` is called: users are a table, so that each is computed once."""
    events = {"user": user_events, "vendor": vendor_events}
    inputs = {}
    for name, level in sizes.levels.items():
        at = TABLE if name == "user" else name
        inputs[f"{name}_features"] = Input(at, shape=(level.features,))
        inputs[f"{name}_tokens"] = Input(at, shape=(level.tokens, sizes.width))
        if level.history:
            inputs[f"{name}_history"] = Input(at, shape=(events[name], sizes.width))
            inputs[f"{name}_lengths"] = Input(at, torch.int32, bounds=(0, events[name]))
    return Signature(
        "user",
        {"vendor": "user", "item": "vendor"},
        inputs,
        "item",
        tables={TABLE: "user"},
        independent=True,
    )


class RankerScorer(nn.Module):
    """The demo's ranker with one argument a tensor.

    Args:
        ranker: flat or on the tree, with `table_sizes`.
    """

    def __init__(self, ranker: FlatRanker | TreeRanker) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(
        self,
        tree: ikbo.BroadcastTree,
        user_features: Tensor,
        user_tokens: Tensor,
        user_history: Tensor,
        user_lengths: Tensor,
        vendor_features: Tensor,
        vendor_tokens: Tensor,
        vendor_history: Tensor,
        vendor_lengths: Tensor,
        item_features: Tensor,
        item_tokens: Tensor,
    ) -> Tensor:
        """Scores [items]."""
        user = LevelInputs(user_features, user_tokens, user_history, user_lengths)
        vendor = LevelInputs(vendor_features, vendor_tokens, vendor_history, vendor_lengths)
        inputs = {TABLE: user, "vendor": vendor, "item": LevelInputs(item_features, item_tokens)}
        scores: Tensor = self.ranker(tree, inputs)
        return scores


def table_sizes(sizes: RankerSizes = SIZES) -> RankerSizes:
    """The sizes with users as a table."""
    levels = {TABLE if name == "user" else name: level for name, level in sizes.levels.items()}
    return RankerSizes(levels, sizes.width, sizes.seeds, sizes.heads, sizes.head_dim, sizes.hidden)


def scorers(seed: int = 0, sizes: RankerSizes = SIZES) -> dict[str, RankerScorer]:
    """The flat model and the tree model, of the same parameters.

    Args:
        seed: of the parameters.
        sizes: of the ranker, whose inputs the requests must have.
    """
    torch.manual_seed(seed)
    flat, tree = FlatRanker(table_sizes(sizes)), TreeRanker(table_sizes(sizes))
    tree.load_state_dict(flat.state_dict())
    return {"flat": RankerScorer(flat).eval(), "tree": RankerScorer(tree).eval()}


class HistoryProjection(nn.Module):
    """The coarse part of a ranker: what it makes of users' histories, whatever the candidates.

    Args:
        key: projects events to keys.
        value: projects events to values.
    """

    def __init__(self, key: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.key, self.value = key, value

    def forward(self, user_history: Tensor) -> dict[str, Tensor]:
        """Keys and values of all events: [users, 2, events, inner]."""
        found = [self.key(user_history), self.value(user_history)]
        return {"user_memory": torch.stack(found, dim=1)}


class _Projected(nn.Module):
    """Keys or values out of `HistoryProjection`, in place of what would project them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, memory: Tensor) -> Tensor:
        return memory[:, self.number]


class MemoryScorer(nn.Module):
    """`RankerScorer` for histories of users that are projected already.

    Args:
        ranker: on the tree, with `table_sizes`; it is copied.
    """

    def __init__(self, ranker: TreeRanker) -> None:
        super().__init__()
        ranker = copy.deepcopy(ranker)
        ranker.key[TABLE], ranker.value[TABLE] = _Projected(0), _Projected(1)
        self.scorer = RankerScorer(ranker)

    def forward(
        self,
        tree: ikbo.BroadcastTree,
        user_features: Tensor,
        user_tokens: Tensor,
        user_lengths: Tensor,
        user_memory: Tensor,
        vendor_features: Tensor,
        vendor_tokens: Tensor,
        vendor_history: Tensor,
        vendor_lengths: Tensor,
        item_features: Tensor,
        item_tokens: Tensor,
    ) -> Tensor:
        """Scores [items]."""
        user = (user_features, user_tokens, user_memory, user_lengths)
        vendor = (vendor_features, vendor_tokens, vendor_history, vendor_lengths)
        scores: Tensor = self.scorer(tree, *user, *vendor, item_features, item_tokens)
        return scores


def staged(seed: int = 0, sizes: RankerSizes = SIZES) -> Staged:
    """The tree model of `scorers`, with its projection of users' histories as a coarse part."""
    ranker = scorers(seed, sizes)["tree"].ranker
    assert isinstance(ranker, TreeRanker)
    whole = signature(sizes)
    events, _ = whole.inputs["user_history"].shape
    memory = Input(TABLE, shape=(2, events, sizes.heads * sizes.head_dim))
    coarse = {TABLE: Coarse(("user_history",), {"user_memory": memory})}
    part = HistoryProjection(ranker.key[TABLE], ranker.value[TABLE])
    model = Staged(MemoryScorer(ranker), {TABLE: part}, replace(whole, coarse=coarse))
    return model.eval()


def requests(traffic: Traffic, users: int, ratio: float, number: int = 0) -> list[Request]:
    """Generated requests of one user each.

    Args:
        traffic: generates them.
        users: how many.
        ratio: mean items of a user.
        number: of the batch: another number, other requests.
    """
    made = traffic.requests(users, ratio, number)
    return [_one(made, user, number * users + user) for user in range(users)]


def _one(made: Requests, user: int, key: int) -> Request:
    part = made.tree.select(user=[user])
    inputs: dict[str, Tensor] = {}
    for name, level in made.inputs.items():
        rows = part.origin(name).long()
        for field in ("features", "tokens", "history", "lengths"):
            values = getattr(level, field)
            if values is not None:
                inputs[f"{name}_{field}"] = values[rows]
    counts = {name: part.counts(name) for name in ("vendor", "item")}
    return Request(counts, inputs, keys={"user": [key]}, versions={"user": [0]})


def largest(requests: Sequence[Request]) -> int:
    """Most items of any request."""
    return max(len(request.inputs["item_features"]) for request in requests)
