"""DCN-V2 (Wang et al., arXiv 2008.13535), cross and deep network side by side."""

import torch
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class DCNv2(nn.Module):
    """x <- x0 * (W x + b) + x over all features of user and item, beside an MLP over the same."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.user_norm = nn.BatchNorm1d(s.dense)
        self.item_norm = nn.BatchNorm1d(s.dense)
        # One table for all fields, each with its own range of rows.
        self.user_table = nn.Embedding(s.fields * s.vocabulary, s.width)
        self.item_table = nn.Embedding(s.fields * s.vocabulary, s.width)
        self.register_buffer("starts", torch.arange(s.fields) * s.vocabulary, persistent=False)
        features = 2 * (s.dense + s.fields * s.width)
        self.cross = nn.ModuleList(nn.Linear(features, features) for _ in range(s.layers))
        self.deep = nn.Sequential(mlp(features, *s.inner), nn.ReLU())
        self.head = nn.Linear(features + s.inner[-1], s.tasks)

    def forward(self, user_x: Tensor, user_ids: Tensor, item_x: Tensor, item_ids: Tensor) -> Tensor:
        user_embedded = self.user_table(user_ids + self.starts).flatten(1)
        item_embedded = self.item_table(item_ids + self.starts).flatten(1)
        x0 = torch.cat(
            [self.user_norm(user_x), user_embedded, self.item_norm(item_x), item_embedded], dim=-1
        )
        x = x0
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.head(torch.cat([x, self.deep(x0)], dim=-1))
