"""One small ranking model, twice: flat, as anyone writes it in PyTorch, and on a tree.

Both are built from the same parameters, so a checkpoint of one loads into the other:

    tokens of all levels   --linear compression-->  a few seeds a candidate
    seeds                  --target attention---->  what the histories say about the candidate
    features of all levels + attended seeds  --linear, silu, linear-->  score

`FlatRanker` copies every level's tensors to the candidates first. `TreeRanker` never does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo_tree as ikbo
from ikbo_tree.nn import TreeLinear, TreeLinearCompression


@dataclass(frozen=True)
class LevelInputs:
    """What is known about the rows of one level (or table), at that level's own batch size.

    Attributes:
        features: [rows, F], goes into the final layers as it is.
        tokens: [rows, T, width], embeddings that are compressed into seeds.
        history: [rows, S, width] embedded events that seeds attend to, padded; None: no history.
        lengths: [rows] int32 or int64, real events of each row; None: S each.
    """

    features: Tensor
    tokens: Tensor
    history: Tensor | None = None
    lengths: Tensor | None = None

    def to(self, dtype: torch.dtype) -> LevelInputs:
        """The same in another float dtype."""
        history = None if self.history is None else self.history.to(dtype)
        return replace(
            self, features=self.features.to(dtype), tokens=self.tokens.to(dtype), history=history
        )


Inputs = Mapping[str, LevelInputs]
"""By level or table name, coarse to fine; the last is the candidates' level."""


@dataclass(frozen=True)
class LevelSizes:
    """Widths of one level: F and T of `LevelInputs`, and whether it has a history."""

    features: int
    tokens: int
    history: bool = False


@dataclass(frozen=True)
class RankerSizes:
    """Widths of a ranker.

    Attributes:
        levels: by name, coarse to fine.
        width: of tokens and history events.
        seeds: tokens that a candidate's are compressed to; each attends on its own.
        heads: attention heads.
        head_dim: width of one.
        hidden: width of the layer before the score.
    """

    levels: Mapping[str, LevelSizes]
    width: int = 32
    seeds: int = 4
    heads: int = 2
    head_dim: int = 16
    hidden: int = 64


class Ranker(nn.Module):
    """The parameters that both rankers have.

    Args:
        sizes: their widths.
    """

    def __init__(self, sizes: RankerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        levels = sizes.levels
        inner = sizes.heads * sizes.head_dim
        self.compress = nn.Linear(sum(x.tokens for x in levels.values()), sizes.seeds, bias=False)
        self.query = nn.Linear(sizes.width, inner, bias=False)
        # Softmax does not see a bias of the keys, so they have none.
        remembering = [name for name, level in levels.items() if level.history]
        self.key = nn.ModuleDict(
            {name: nn.Linear(sizes.width, inner, bias=False) for name in remembering}
        )
        self.value = nn.ModuleDict({name: nn.Linear(sizes.width, inner) for name in remembering})
        features = sum(level.features for level in levels.values())
        self.hidden = nn.Linear(features + sizes.seeds * inner, sizes.hidden)
        self.score = nn.Linear(sizes.hidden, 1)

    def heads(self, x: Tensor) -> Tensor:
        """[..., heads * head_dim] to [..., heads, head_dim]."""
        return x.view(*x.shape[:-1], self.sizes.heads, self.sizes.head_dim)


class FlatRanker(Ranker):
    """The ranker in plain PyTorch: everything is copied to the candidates, then combined.

    It copies as late as it can: histories are projected to keys and values once a row of their own
    level, and the projections are what is copied.
    """

    def forward(self, tree: ikbo.BroadcastTree, inputs: Inputs) -> Tensor:
        """Scores [candidates]; of the tree it uses each candidate's row at every level."""
        *_, leaf = inputs
        row = {name: tree.ancestors(leaf, of=name) for name in inputs}

        def copied(x: Tensor, name: str) -> Tensor:
            return x if name == leaf else x.index_select(0, row[name])

        tokens = torch.cat([copied(x.tokens, name) for name, x in inputs.items()], dim=1)
        q = self.heads(self.query(self.compress.weight @ tokens))  # [candidates, seeds, H, D]

        keys, values, masks = [], [], []
        for name, x in inputs.items():
            if x.history is None:
                continue
            keys.append(copied(self.heads(self.key[name](x.history)), name))
            values.append(copied(self.heads(self.value[name](x.history)), name))
            masks.append(copied(_real_events(x), name))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            torch.cat(keys, dim=1).transpose(1, 2),  # [candidates, H, S of all levels, D]
            torch.cat(values, dim=1).transpose(1, 2),
            attn_mask=torch.cat(masks, dim=1)[:, None, None],
        ).transpose(1, 2)

        features = [copied(x.features, name) for name, x in inputs.items()]
        hidden = self.hidden(torch.cat([*features, attended.flatten(1)], dim=1))
        scores: Tensor = self.score(F.silu(hidden)).squeeze(1)
        return scores


class TreeRanker(Ranker):
    """The same ranker on a tree: every tensor stays at the batch size of its own level.

    Args:
        sizes: of its parameters.
    """

    def __init__(self, sizes: RankerSizes) -> None:
        super().__init__(sizes)
        levels = sizes.levels
        tokens = {name: level.tokens for name, level in levels.items()}
        features = {name: level.features for name, level in levels.items()}
        *_, leaf = levels
        features[leaf] += self.hidden.in_features - sum(features.values())  # the attended seeds
        # Of its own class, but with the same parameter under the same name.
        self.compress = TreeLinearCompression.from_flat(  # type: ignore[assignment]
            self.compress, tokens
        )
        self.hidden = TreeLinear.from_flat(self.hidden, features)

    def forward(self, tree: ikbo.BroadcastTree, inputs: Inputs) -> Tensor:
        """Scores [candidates]."""
        *_, leaf = inputs
        tokens = {name: x.tokens for name, x in inputs.items()}
        seeds = self.compress(tokens, tree=tree)  # [candidates, seeds, width]

        histories = [
            ikbo.Memory(
                name,
                self.heads(self.key[name](x.history)),
                self.heads(self.value[name](x.history)),
                lengths=x.lengths,
            )
            for name, x in inputs.items()
            if x.history is not None
        ]
        q = self.heads(self.query(seeds))  # [candidates, seeds, H, D]
        attended = ikbo.target_attention(q, histories, tree=tree, level=leaf)

        features = {name: x.features for name, x in inputs.items()}
        features[leaf] = torch.cat([features[leaf], attended.flatten(1)], dim=1)
        hidden = self.hidden(features, tree=tree)
        scores: Tensor = self.score(F.silu(hidden)).squeeze(1)
        return scores


def _real_events(x: LevelInputs) -> Tensor:
    """[rows, S] bool, true for the real events of a padded history."""
    assert x.history is not None
    rows, events = x.history.shape[:2]
    if x.lengths is None:
        return torch.ones(rows, events, dtype=torch.bool, device=x.history.device)
    return torch.arange(events, device=x.lengths.device) < x.lengths[:, None]
