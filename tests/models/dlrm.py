"""DLRM (Naumov et al., arXiv 1906.00091) on rows that hold user and item features alike."""

import torch
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class DLRM(nn.Module):
    """Bottom MLPs and embeddings, dot products of every two of them, top MLP."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.user_bottom = mlp(s.dense, *s.inner, s.width)
        self.item_bottom = mlp(s.dense, *s.inner, s.width)
        self.user_tables = self._tables(s)
        self.item_tables = self._tables(s)
        self.history_table = nn.EmbeddingBag(s.vocabulary, s.width, mode="mean")
        tokens = 2 * (1 + s.fields) + 1
        rows, columns = torch.tril_indices(tokens, tokens, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.top = mlp(2 * s.width + len(rows), *s.hidden, s.tasks)

    @staticmethod
    def _tables(s: Sizes) -> nn.ModuleList:
        return nn.ModuleList(nn.Embedding(s.vocabulary, s.width) for _ in range(s.fields))

    def forward(
        self,
        user_x: Tensor,
        user_ids: Tensor,
        history_ids: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
    ) -> Tensor:
        user = self.user_bottom(user_x)
        item = self.item_bottom(item_x)
        tokens = [user, item, self.history_table(history_ids)]
        tokens += [table(user_ids[:, i]) for i, table in enumerate(self.user_tables)]
        tokens += [table(item_ids[:, i]) for i, table in enumerate(self.item_tables)]
        x = torch.stack(tokens, dim=1)
        dots = torch.bmm(x, x.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat([user, item, dots], dim=1))
