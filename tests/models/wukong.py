"""A Wukong-style stack (Zhang et al., arXiv 2403.02545): factorisation machines, layer on layer."""

import torch
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class WukongLayer(nn.Module):
    """Half of the tokens from a factorisation machine block, half from linear compression."""

    def __init__(self, tokens: int, s: Sizes) -> None:
        super().__init__()
        made = tokens // 2
        self.project = nn.Parameter(torch.randn(tokens, s.rank) / tokens**0.5)
        self.compress = nn.Parameter(torch.randn(tokens - made, tokens) / tokens**0.5)
        self.fm_norm = nn.LayerNorm(tokens * s.rank)
        self.fm_mlp = mlp(tokens * s.rank, *s.inner, made * s.width)
        self.unflatten = nn.Unflatten(1, (made, s.width))
        self.norm = nn.LayerNorm(s.width)

    def forward(self, x: Tensor) -> Tensor:
        # x x^T Y without the tokens x tokens matrix.
        fm = torch.bmm(x, x.transpose(1, 2) @ self.project)
        fm = self.unflatten(self.fm_mlp(self.fm_norm(fm.flatten(1))))
        return self.norm(torch.cat([fm, self.compress @ x], dim=1) + x)


class Wukong(nn.Module):
    """Tokens of dense and categorical features of user and item, then the stack, then an MLP."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.width = s.width
        self.user_dense = mlp(s.dense, *s.hidden, s.fields * s.width)
        self.item_dense = mlp(s.dense, *s.hidden, s.fields * s.width)
        self.user_table = nn.Embedding(s.vocabulary, s.width)
        self.item_table = nn.Embedding(s.vocabulary, s.width)
        tokens = 4 * s.fields
        self.layers = nn.Sequential(*(WukongLayer(tokens, s) for _ in range(s.layers)))
        self.head = mlp(tokens * s.width, *s.hidden, s.tasks)

    def forward(
        self,
        user_x: Tensor,
        user_ids: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
        item_to_user: Tensor,
    ) -> Tensor:
        user_x = user_x.index_select(0, item_to_user)
        user_ids = user_ids.index_select(0, item_to_user)
        tokens = [
            self.user_dense(user_x).view(user_x.shape[0], -1, self.width),
            self.user_table(user_ids),
            self.item_dense(item_x).view(item_x.shape[0], -1, self.width),
            self.item_table(item_ids),
        ]
        x = self.layers(torch.cat(tokens, dim=1))
        return self.head(x.flatten(1))
