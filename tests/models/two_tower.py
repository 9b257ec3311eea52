"""Two towers with late interaction (ColBERT: Khattab and Zaharia, arXiv 2004.12832)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class Block(nn.Module):
    """A residual feed-forward network over each token."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(s.width)
        self.mlp = mlp(s.width, *s.inner, s.width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class TwoTower(nn.Module):
    """Every token of the item finds the token of the user that is most like it (MaxSim)."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.user_in = nn.Linear(s.dense, s.width)
        self.item_table = nn.Embedding(s.vocabulary, s.width)
        self.user_tower = nn.Sequential(*(Block(s) for _ in range(s.layers)))
        self.item_tower = nn.Sequential(*(Block(s) for _ in range(s.layers)))
        features = s.tokens + 2 * s.width
        self.norm = nn.LayerNorm(features)
        self.head = mlp(features, *s.hidden, s.tasks, activation=nn.GELU)

    def forward(self, user_tokens: Tensor, user_mask: Tensor, item_ids: Tensor) -> Tensor:
        user = F.normalize(self.user_tower(self.user_in(user_tokens)), dim=-1)
        item = F.normalize(self.item_tower(self.item_table(item_ids)), dim=-1)
        similarity = torch.einsum("bud,bid->bui", user, item)
        padding = ~user_mask.unsqueeze(-1)
        best = similarity.masked_fill(padding, float("-inf")).amax(dim=1)  # [rows, item tokens]

        present = user_mask.unsqueeze(-1).to(user.dtype)
        pooled_user = (user * present).sum(dim=1) / present.sum(dim=1)
        features = torch.cat([best, pooled_user, item.mean(dim=1)], dim=-1)
        return self.head(self.norm(features))
