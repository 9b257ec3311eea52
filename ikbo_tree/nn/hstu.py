"""A layer of HSTU over histories and the candidates below them, flat and on a tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.nn.attention import check_levels, check_query, history_of
from ikbo_tree.nn.levels import as_cast, live_rows, owned_entries, share
from ikbo_tree.ops.memories import Memory, shape_of
from ikbo_tree.ops.silu_attention import silu_attention
from ikbo_tree.tree import BroadcastTree


class HSTULayer(nn.Module):
    """A layer of HSTU (Zhai et al., arXiv 2402.17152) over a history and a candidate behind it.

    Positions attend by silu of each score, not by a softmax, with a bias for how far back an event
    lies; what they find is normalised and gated. Events see those up to themselves, the candidate
    sees all of them, nobody sees the candidate. `TreeHSTU` is the same for many candidates a
    history.

    Args:
        embed_dim: E.
        num_heads: H, divides E.
        length: of the longest history, which sums are divided by.
        device: of the parameters.
        dtype: of the parameters.

    >>> layer = HSTULayer(8, 2, length=5)
    >>> history, candidate = layer(torch.randn(3, 5, 8), torch.randn(3, 8))
    >>> history.shape, candidate.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads or length < 1:
            got = f"{embed_dim}, {num_heads} and {length}"
            raise ValueError(f"num_heads must divide embed_dim, length be positive; got {got}")
        self.embed_dim, self.num_heads, self.length = embed_dim, num_heads, length
        self.norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype)
        self.uvqk = nn.Linear(embed_dim, 4 * embed_dim, device=device, dtype=dtype)
        self.distance_bias = nn.Parameter(
            torch.empty(length + 1, num_heads, device=device, dtype=dtype)
        )
        self.out_norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, device=device, dtype=dtype)
        nn.init.normal_(self.distance_bias, std=0.02)

    def forward(
        self, history: Tensor, candidate: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both one layer further.

        Args:
            history: [B, S, E].
            candidate: [B, E].
            lengths: [B], real events of each history; None: S.
        """
        real = _real(history, lengths)
        u, v, q, k = self.project(history)
        found = self.attend_to_past(q, k, v, real)
        gate, _, query, _ = self.project(candidate.unsqueeze(1))
        scores = torch.einsum("bnhd,bshd->bhns", query, k) * self.scale
        scores = scores + self.bias_from_end(history, lengths).transpose(1, 2).unsqueeze(2)
        weights = F.silu(scores).masked_fill(~real[:, None, None, :], 0) / self.length
        seen = torch.einsum("bhns,bshd->bnhd", weights, v)
        moved = self.finish(candidate.unsqueeze(1), gate, seen).squeeze(1)
        return self.finish(history, u, found), moved

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float((self.embed_dim // self.num_heads) ** -0.5)

    def heads(self, x: Tensor) -> Tensor:
        """[..., E] to [..., H, E / H]."""
        found: Tensor = x.unflatten(-1, (self.num_heads, -1))
        return found

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gates [..., E], and values, queries and keys [..., H, E / H]."""
        u, *vqk = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        v, q, k = (self.heads(y) for y in vqk)
        return u, v, q, k

    def finish(self, x: Tensor, u: Tensor, found: Tensor) -> Tensor:
        """`x` plus what attention found [..., H, E / H], normalised, gated and mapped."""
        moved: Tensor = x + self.out(self.out_norm(found.flatten(-2)) * u)
        return moved

    def attend_to_past(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """[rows, S, H, E / H]: each event sees the real ones up to itself."""
        at = torch.arange(q.shape[1], device=q.device)
        distance = (at.unsqueeze(1) - at).clamp(min=0)
        bias = self.distance_bias[distance].permute(2, 0, 1)
        seen = (at <= at.unsqueeze(1)) & real.unsqueeze(1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale + bias
        weights = F.silu(scores).masked_fill(~seen.unsqueeze(1), 0) / self.length
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def bias_from_end(self, history: Tensor, lengths: Tensor | None) -> Tensor:
        """[rows, S, H]: the bias of each event as seen from behind the last real one."""
        size = history.shape[1]
        at = torch.arange(size, device=history.device)
        end = history.new_full((history.shape[0], 1), size, dtype=torch.int64)
        end = end if lengths is None else lengths.to(torch.int64).unsqueeze(1)
        return self.distance_bias[(end - at).clamp(0, self.length)]

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.embed_dim}, {self.num_heads}, length={self.length}"


class TreeHSTU(HSTULayer):
    """A layer of HSTU over histories and all candidates below them.

    Parameters are those of `HSTULayer`. What concerns a history alone, its keys and values among
    it, is done once a history; candidates attend by `ikbo_tree.silu_attention`.

    Args:
        embed_dim: E.
        num_heads: H, divides E.
        length: of the longest history, which sums are divided by.
        of: the level or table of the histories.
        level: the level of the candidates.
        device: of the parameters.
        dtype: of the parameters.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> layer = TreeHSTU(8, 2, length=5, of="user", level="item")
    >>> x = layer({"user": torch.randn(2, 5, 8), "item": torch.randn(3, 8)}, tree=tree)
    >>> x["user"].shape, x["item"].shape
    (torch.Size([2, 5, 8]), torch.Size([3, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        length: int,
        *,
        of: str,
        level: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, length, device=device, dtype=dtype)
        check_levels(of, level)
        self.of, self.level = of, level

    @classmethod
    def from_flat(cls, flat: HSTULayer, *, of: str, level: str) -> Self:
        """A module that shares the parameters of a flat one."""
        sizes = flat.embed_dim, flat.num_heads, flat.length
        module = cls(*sizes, of=of, level=level, device="meta")
        share(module, flat)
        return module

    def to_flat(self) -> HSTULayer:
        """The flat module, with the same parameters."""
        flat = HSTULayer(self.embed_dim, self.num_heads, self.length, device="meta")
        share(flat, self)
        return flat

    def forward(  # type: ignore[override]  # of two levels, not of two tensors
        self,
        inputs: Mapping[str, Tensor],
        *,
        tree: BroadcastTree,
        lengths: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Both levels one layer further.

        Args:
            inputs: of `of` the histories [rows, S, E], padded; of `level` candidates [rows, E], or
                [rows, n, E] for n a row that do not see each other.
            tree: the tree.
            lengths: [rows of `of`], real events of each history; None: S.

        Returns:
            The same names and shapes. What no row owns in the histories is zero, so are dead rows.

        Raises:
            TreeError: other names, histories longer than `length`; shapes, rows, values or devices
                that do not fit.
        """
        history = history_of(inputs, self.of, self.level, tree, lengths, None)
        own, target = history.k, inputs[self.level]
        check_query(target, self.embed_dim)
        if own.shape[1] > self.length:
            rule = f"must hold at most {self.length} events"
            raise TreeError(f'inputs["{self.of}"]', rule, shape_of(own))
        one = target.dim() == 2
        target = live_rows(target.unsqueeze(1) if one else target, tree, self.level)
        u, v, q, k = self.project(own)
        found = self.attend_to_past(q, k, v, _real(own, history.lengths))
        gate, _, query, _ = self.project(target)
        bias = self.bias_from_end(own, history.lengths)
        memory = Memory(self.of, k, v, lengths=history.lengths, bias=bias)
        with as_cast(target):
            seen = silu_attention(
                query, [memory], tree=tree, level=self.level, length=self.length, scale=self.scale
            )
        target = live_rows(self.finish(target, gate, seen), tree, self.level)
        return {
            self.of: owned_entries(self.finish(own, u, found), history, tree),
            self.level: target.squeeze(1) if one else target,
        }

    def extra_repr(self) -> str:
        """Sizes and levels."""
        return f"{super().extra_repr()}, of={self.of}, level={self.level}"


def _real(history: Tensor, lengths: Tensor | None) -> Tensor:
    """Bool [rows, S], true for real events."""
    rows, size = history.shape[:2]
    if lengths is None:
        return torch.ones(rows, size, dtype=torch.bool, device=history.device)
    return torch.arange(size, device=history.device) < lengths.unsqueeze(1)
