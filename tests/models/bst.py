"""Behaviour Sequence Transformer (Chen et al., arXiv 1905.06874) with the item as last query."""

import torch
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class EncoderLayer(nn.Module):
    """Self-attention over the history and a feed-forward network, normalised after each."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(s.width, s.heads, batch_first=True)
        self.feed_forward = mlp(s.width, *s.inner, s.width, activation=nn.LeakyReLU)
        self.norm1 = nn.LayerNorm(s.width)
        self.norm2 = nn.LayerNorm(s.width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm1(x + attended)
        return self.norm2(x + self.feed_forward(x))


class BST(nn.Module):
    """Events with positions through encoder layers; the item attends to them; an MLP on top."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(s.vocabulary, s.width)
        self.positions = nn.Parameter(torch.randn(s.history, s.width))
        self.encoder = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))
        self.target_attention = nn.MultiheadAttention(s.width, s.heads, batch_first=True)
        features = 2 * s.width + 2 * s.dense
        self.head = mlp(features, *s.hidden, s.tasks, activation=nn.LeakyReLU)

    def forward(
        self,
        user_x: Tensor,
        history_ids: Tensor,
        history_padding: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
    ) -> Tensor:
        history = self.items(history_ids) + self.positions
        for layer in self.encoder:
            history = layer(history, history_padding)
        target = self.items(item_ids)
        interest, _ = self.target_attention(
            target.unsqueeze(1),
            history,
            history,
            key_padding_mask=history_padding,
            need_weights=False,
        )
        return self.head(torch.cat([user_x, interest.squeeze(1), target, item_x], dim=-1))
