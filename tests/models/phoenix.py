"""A Phoenix-style ranker: a transformer in which candidates are isolated from each other.

The context (the user and the history) attends to itself. A candidate attends to the context and to
itself, with the same parameters, so its score does not depend on which others are scored with it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.sizes import Sizes


class Layer(nn.Module):
    """Pre-norm attention and a gated feed-forward network."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        (inner,) = s.inner
        self.heads = s.heads
        self.attention_norm = nn.RMSNorm(s.width)
        self.qkv = nn.Linear(s.width, 3 * s.width, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)
        self.ffn_norm = nn.RMSNorm(s.width)
        self.gate_up = nn.Linear(s.width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, s.width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [rows, heads, length, head dim]."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Phoenix(nn.Module):
    """Context tokens [user, history...] and one candidate token a row."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.user = nn.Linear(s.dense, s.width)
        self.event = nn.Linear(s.dense, s.width)
        self.candidate = nn.Linear(s.dense, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width)
        self.unembed = nn.Linear(s.width, s.tasks)

    def forward(
        self,
        user_x: Tensor,
        history_x: Tensor,
        history_mask: Tensor,
        item_x: Tensor,
        item_to_user: Tensor,
    ) -> Tensor:
        context = torch.cat([self.user(user_x).unsqueeze(1), self.event(history_x)], dim=1)
        mask = F.pad(history_mask, (1, 0), value=True)  # the user token is always there
        context, mask = context[item_to_user], mask[item_to_user]
        mask = mask[:, None, None, :]
        own_mask = F.pad(mask, (0, 1), value=True)
        x = self.candidate(item_x).unsqueeze(1)
        for layer in self.layers:
            q, k, v = layer.project(x)
            context_q, context_k, context_v = layer.project(context)
            k, v = torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)
            x = layer.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=own_mask))
            if layer is not self.layers[-1]:  # nobody reads the context after the last one
                attended = F.scaled_dot_product_attention(
                    context_q, context_k, context_v, attn_mask=mask
                )
                context = layer.finish(context, attended)
        return self.unembed(self.norm(x.squeeze(1)))
