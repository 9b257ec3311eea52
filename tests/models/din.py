"""Deep Interest Network (Zhou et al., arXiv 1706.06978), with a softmax over the history."""

import torch
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class DIN(nn.Module):
    """An MLP weighs every event of the user's history by how it relates to the item."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(s.vocabulary, s.width)
        self.attention = mlp(4 * s.width, *s.inner, 1, activation=nn.PReLU)
        self.head = mlp(2 * s.width + 2 * s.dense, *s.hidden, s.tasks, activation=nn.PReLU)

    def forward(
        self,
        user_x: Tensor,
        history_ids: Tensor,
        history_lengths: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
        item_to_user: Tensor,
    ) -> Tensor:
        positions = torch.arange(history_ids.shape[1], device=history_ids.device)
        padding = positions >= history_lengths.unsqueeze(1)
        history = self.items(history_ids)[item_to_user]  # [items, L, width]
        padding = padding[item_to_user]
        target = self.items(item_ids)

        query = target.unsqueeze(1).expand_as(history)
        pair = torch.cat([query, history, query - history, query * history], dim=-1)
        scores = self.attention(pair).squeeze(-1).masked_fill(padding, float("-inf"))
        interest = torch.bmm(scores.softmax(dim=-1).unsqueeze(1), history).squeeze(1)
        return self.head(torch.cat([user_x[item_to_user], interest, target, item_x], dim=-1))
