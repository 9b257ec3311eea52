"""Generated requests over user -> vendor -> item, from documented distributions.

- Items a user: log-normal with shape `spread`, scaled so that their mean is `ratio`; at least one.
- Vendors: a catalogue whose popularity is Zipf's, p(k) ~ 1 / (k + 1) ** zipf; every vendor offers
  equally many items. A user's candidates are drawn from all items without replacement, so popular
  vendors have many items in a request and most vendors few or none.
- A vendor row is a vendor as one user knows it. Histories hold events, each an item that the user
  came across (at a vendor: one of that vendor's items) and whether the user liked it; their number
  is uniform on 0 .. the longest.
- Users, vendors and items have hidden unit vectors of taste, an item near its vendor's, and items
  an appeal, normal. A user likes an item with probability sigmoid(4 * <tastes> + appeal): so labels
  are drawn, and what events show. Features, tokens and events are linear views of what is hidden,
  plus normal noise.

Everything follows from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.demo.ranker import LevelInputs, LevelSizes, RankerSizes

SIZES = RankerSizes(
    levels={
        "user": LevelSizes(features=32, tokens=16, history=True),
        "vendor": LevelSizes(features=16, tokens=8, history=True),
        "item": LevelSizes(features=16, tokens=8),
    }
)
TASTE = 8
"""Width of the hidden taste vectors."""
HIDDEN = TASTE + 1
"""Taste, and the appeal of an item or the outcome of an event (1 liked, -1 not)."""


@dataclass(frozen=True)
class Requests:
    """Some users' requests: one tree, inputs of every level, a label for every candidate."""

    tree: ikbo.BroadcastTree
    inputs: dict[str, LevelInputs]
    labels: Tensor

    def to(self, dtype: torch.dtype) -> Requests:
        """The same in another float dtype."""
        inputs = {name: x.to(dtype) for name, x in self.inputs.items()}
        return replace(self, inputs=inputs, labels=self.labels.to(dtype))


@dataclass(frozen=True)
class Distributions:
    """Parameters of the distributions above.

    Attributes:
        spread: standard deviation of the logarithm of a user's number of items.
        zipf: exponent of the vendors' popularity.
        vendors: in the catalogue.
        items_per_vendor: offered by each.
        user_events: longest history of a user.
        vendor_events: longest history of a vendor.
    """

    spread: float = 0.8
    zipf: float = 1.1
    vendors: int = 400
    items_per_vendor: int = 50
    user_events: int = 64
    vendor_events: int = 16


class Traffic:
    """A catalogue of vendors and items, and requests for it.

    Args:
        seed: of the catalogue and of all requests.
        distributions: their parameters.
        sizes: widths of the inputs; the levels are `SIZES`'.
        device: where requests go.
    """

    def __init__(
        self,
        seed: int,
        distributions: Distributions | None = None,
        sizes: RankerSizes = SIZES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.seed = seed
        self.sizes = sizes
        self.device = torch.device(device)
        self.distributions = d = distributions or Distributions()
        rng = np.random.default_rng([seed, 0])
        items = d.vendors * d.items_per_vendor
        self._vendors = _with(_unit(rng.normal(size=(d.vendors, TASTE))), np.zeros(d.vendors))
        of_vendor = self._vendors[:, :TASTE].repeat(d.items_per_vendor, 0)
        own = _unit(rng.normal(size=(items, TASTE)))
        self._items = _with(_unit(0.6 * of_vendor + 0.8 * own), rng.normal(size=items))
        popularity = 1.0 / np.arange(1, d.vendors + 1) ** d.zipf
        self._log_p = np.log(popularity / popularity.sum()).repeat(d.items_per_vendor)
        self._views = {
            (name, part): rng.normal(size=(HIDDEN, count)).astype(np.float32)
            for name, level in sizes.levels.items()
            for part, count in (
                ("features", level.features),
                ("tokens", level.tokens * sizes.width),
                ("history", sizes.width),
            )
        }

    def requests(self, users: int, ratio: float, number: int = 0) -> Requests:
        """One batch of requests.

        Args:
            users: how many.
            ratio: mean items a user; each has at most the whole catalogue.
            number: of the batch: another number, other requests.
        """
        d = self.distributions
        rng = np.random.default_rng([self.seed, 1, number])
        user, item = self._log(rng, users, ratio)
        vendor = item // d.items_per_vendor
        tree = ikbo.BroadcastTree.from_keys({"user": user, "vendor": vendor, "item": item})
        tastes = _with(_unit(rng.normal(size=(users, TASTE))), np.zeros(users))
        vendor_user, vendor_key = tree.parents("vendor").numpy(), tree.keys("vendor")
        # Events: any item for a user, one of the vendor's own at a vendor.
        seen = rng.integers(len(self._items), size=(users, d.user_events))
        ordered = rng.integers(d.items_per_vendor, size=(len(vendor_key), d.vendor_events))
        ordered += (vendor_key * d.items_per_vendor)[:, None]
        inputs = {
            "user": self._inputs("user", rng, tastes, seen, tastes),
            "vendor": self._inputs(
                "vendor", rng, self._vendors[vendor_key], ordered, tastes[vendor_user]
            ),
            "item": self._inputs("item", rng, self._items[item]),
        }
        labels = torch.from_numpy(self._likes(rng, tastes[user], item)).float()
        return Requests(tree.to(self.device), inputs, labels.to(self.device))

    def _log(self, rng: np.random.Generator, users: int, ratio: float) -> tuple[np.ndarray, ...]:
        """The request log: user and item of every candidate, sorted by user and vendor."""
        raw = rng.lognormal(sigma=self.distributions.spread, size=users)
        counts = np.rint(raw * (ratio * users / raw.sum())).astype(np.int64)
        counts = counts.clip(1, len(self._log_p))
        items = []
        for count in counts.tolist():
            # The largest perturbed log-probabilities are a draw without replacement (Gumbel).
            score = self._log_p + rng.gumbel(size=len(self._log_p))
            items.append(np.sort(np.argpartition(-score, count - 1)[:count]))
        return np.repeat(np.arange(users), counts), np.concatenate(items)

    def _likes(self, rng: np.random.Generator, tastes: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Whether users with hidden vectors `tastes` [n, HIDDEN] like items [n, ...]."""
        hidden = self._items[item]
        together = np.einsum("n...t,nt->n...", hidden[..., :TASTE], tastes[:, :TASTE])
        likes: np.ndarray = rng.random(item.shape) < _sigmoid(4 * together + hidden[..., TASTE])
        return likes

    def _inputs(
        self,
        name: str,
        rng: np.random.Generator,
        hidden: np.ndarray,
        seen: np.ndarray | None = None,
        tastes: np.ndarray | None = None,
    ) -> LevelInputs:
        """Noisy views of rows with `hidden` vectors, who saw the items `seen` [rows, events]."""
        level, width = self.sizes.levels[name], self.sizes.width

        def view(part: str, hidden: np.ndarray, *shape: int) -> Tensor:
            clean = (hidden.astype(np.float32) @ self._views[name, part]).reshape(-1, *shape)
            noisy = clean + rng.standard_normal(clean.shape, np.float32)
            return torch.from_numpy(noisy).to(self.device)

        features = view("features", hidden, level.features)
        tokens = view("tokens", hidden, level.tokens, width)
        if seen is None or tastes is None:
            return LevelInputs(features, tokens)
        outcome = np.where(self._likes(rng, tastes, seen), 1.0, -1.0)
        events = np.concatenate([self._items[seen][..., :TASTE], outcome[..., None]], axis=-1)
        lengths = rng.integers(seen.shape[1] + 1, size=len(seen), dtype=np.int32)
        return LevelInputs(
            features,
            tokens,
            view("history", events, seen.shape[1], width),
            torch.from_numpy(lengths).to(self.device),
        )


def _unit(x: np.ndarray) -> np.ndarray:
    unit: np.ndarray = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit


def _with(taste: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Hidden vectors from tastes [n, TASTE] and their last entries [n]."""
    return np.concatenate([taste, last[:, None]], axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    sigmoid: np.ndarray = 1 / (1 + np.exp(-x))
    return sigmoid
