"""An HSTU-style ranker (Zhai et al., arXiv 2402.17152): pointwise attention, gated, no softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class PointwiseAttention(nn.Module):
    """silu(q k^T + bias) / length in place of a softmax; the output is normalised and gated."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.norm = nn.LayerNorm(s.width)
        self.out_norm = nn.LayerNorm(s.width)
        self.out = nn.Linear(s.width, s.width)

    def split(self, x: Tensor) -> Tensor:
        """[rows, L, width] -> [rows, heads, L, width / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, mask: Tensor, bias: Tensor
    ) -> Tensor:
        scores = torch.matmul(self.split(q), self.split(k).transpose(-2, -1)) + bias
        weights = F.silu(scores) * mask / k.shape[1]
        attended = torch.matmul(weights, self.split(v)).transpose(1, 2).flatten(2)
        return self.out(self.out_norm(attended) * gate)


class HistoryBlock(PointwiseAttention):
    """Every event sees the events up to itself, with a bias for how far back they lie."""

    def __init__(self, s: Sizes) -> None:
        super().__init__(s)
        self.gvqk = nn.Linear(s.width, 4 * s.width)
        self.distance_bias = nn.Embedding(s.history, s.heads)
        positions = torch.arange(s.history)
        distance = (positions[:, None] - positions[None, :]).clamp(min=0)
        self.register_buffer("distance", distance, persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        gate, v, q, k = F.silu(self.gvqk(self.norm(x))).chunk(4, dim=-1)
        bias = self.distance_bias(self.distance).permute(2, 0, 1)
        return x + self.attend(q, k, v, gate, mask, bias)


class TargetBlock(PointwiseAttention):
    """The candidate is the query, the history is keys and values."""

    def __init__(self, s: Sizes) -> None:
        super().__init__(s)
        self.gq = nn.Linear(s.width, 2 * s.width)
        self.vk = nn.Linear(s.width, 2 * s.width)
        self.history_norm = nn.LayerNorm(s.width)
        self.recency_bias = nn.Parameter(torch.zeros(s.heads, 1, s.history))

    def forward(self, x: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        gate, q = F.silu(self.gq(self.norm(x))).chunk(2, dim=-1)
        v, k = F.silu(self.vk(self.history_norm(history))).chunk(2, dim=-1)
        return x + self.attend(q, k, v, gate, mask, self.recency_bias)


class HSTU(nn.Module):
    """History blocks, one target block, an MLP. Users come with the number of their items."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.items = nn.Embedding(s.vocabulary, s.width)
        self.actions = nn.Linear(s.dense, s.width)
        self.blocks = nn.ModuleList(HistoryBlock(s) for _ in range(s.layers))
        self.target = TargetBlock(s)
        causal = torch.ones(s.history, s.history).tril().bool()
        self.register_buffer("causal", causal, persistent=False)
        self.head = mlp(s.width + s.dense, *s.hidden, s.tasks, activation=nn.SiLU)

    def forward(
        self,
        history_ids: Tensor,
        history_x: Tensor,
        history_lengths: Tensor,
        item_ids: Tensor,
        item_x: Tensor,
        item_counts: Tensor,
    ) -> Tensor:
        rows = item_ids.shape[0]
        history_ids = history_ids.repeat_interleave(item_counts, dim=0, output_size=rows)
        history_x = history_x.repeat_interleave(item_counts, dim=0, output_size=rows)
        lengths = history_lengths.repeat_interleave(item_counts, dim=0, output_size=rows)

        length = history_ids.shape[1]
        valid = torch.arange(length, device=lengths.device)[None, :] < lengths[:, None]
        valid = valid[:, None, None, :]  # [items, heads, queries, L]
        x = self.items(history_ids) + self.actions(history_x)
        for block in self.blocks:
            x = block(x, self.causal & valid)
        candidate = self.target(self.items(item_ids).unsqueeze(1), x, valid).squeeze(1)
        return self.head(torch.cat([candidate, item_x], dim=-1))
