"""A three-level ads ranker: users see advertisers (vendors), advertisers have ads (items)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import mlp
from models.sizes import Sizes


class EventEncoder(nn.Module):
    """What is known about an ad someone clicked or ran before: [rows, L] -> [rows, L, width]."""

    def __init__(self, ads: nn.Embedding, s: Sizes) -> None:
        super().__init__()
        self.ads = ads
        self.norm = nn.LayerNorm(s.width)
        self.mlp = mlp(s.width, *s.inner, s.width, activation=nn.SiLU)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ads(ids)
        return x + self.mlp(self.norm(x))


class Attention(nn.Module):
    """One query a row attends to that row's events: [rows, width] -> [rows, width]."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads = s.heads
        self.q = nn.Linear(s.width, s.width)
        self.kv = nn.Linear(s.width, 2 * s.width)
        self.out = nn.Linear(s.width, s.width)

    def forward(self, query: Tensor, events: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = events.shape
        head_dim = width // self.heads
        q = self.q(query).view(rows, 1, self.heads, head_dim).transpose(1, 2)
        k, v = self.kv(events).chunk(2, dim=-1)
        k = k.reshape(rows, length, self.heads, head_dim).transpose(1, 2)
        v = v.reshape(rows, length, self.heads, head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(attended.transpose(1, 2).reshape(rows, width))


class ThreeLevelAds(nn.Module):
    """A tower a level; vendor and ad ask the user's history, the ad also the vendor's catalogue."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.ads = nn.Embedding(s.vocabulary, s.width)
        self.user_tower = mlp(s.dense, *s.hidden, s.width, activation=nn.SiLU)
        self.vendor_tower = mlp(s.dense, *s.hidden, s.width, activation=nn.SiLU)
        self.item_tower = mlp(s.dense + s.width, *s.hidden, s.width, activation=nn.SiLU)
        self.history_encoder = EventEncoder(self.ads, s)
        self.catalogue_encoder = EventEncoder(self.ads, s)
        self.affinity = mlp(2 * s.width, *s.hidden, s.width, activation=nn.SiLU)
        self.vendor_interest = Attention(s)
        self.item_interest = Attention(s)
        self.item_in_catalogue = Attention(s)
        self.head = mlp(7 * s.width, *s.hidden, s.tasks, activation=nn.SiLU)

    def forward(
        self,
        user_x: Tensor,
        history_ids: Tensor,
        history_mask: Tensor,
        vendor_x: Tensor,
        catalogue_ids: Tensor,
        catalogue_mask: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
        vendor_to_user: Tensor,
        item_to_vendor: Tensor,
    ) -> Tensor:
        # Everything becomes one row an ad, first user to vendor, then vendor to ad.
        user_x = user_x[vendor_to_user][item_to_vendor]
        history_ids = history_ids[vendor_to_user][item_to_vendor]
        history_mask = history_mask[vendor_to_user][item_to_vendor]
        vendor_x = vendor_x[item_to_vendor]
        catalogue_ids = catalogue_ids[item_to_vendor]
        catalogue_mask = catalogue_mask[item_to_vendor]

        user = self.user_tower(user_x)
        vendor = self.vendor_tower(vendor_x)
        item = self.item_tower(torch.cat([item_x, self.ads(item_ids)], dim=-1))
        history = self.history_encoder(history_ids)
        catalogue = self.catalogue_encoder(catalogue_ids)
        features = [
            user,
            vendor,
            item,
            self.affinity(torch.cat([user, vendor], dim=-1)),
            self.vendor_interest(vendor, history, history_mask),
            self.item_interest(item, history, history_mask),
            self.item_in_catalogue(item, catalogue, catalogue_mask),
        ]
        return self.head(torch.cat(features, dim=-1))
