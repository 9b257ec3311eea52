"""Attention of fine rows to the histories of coarse ones, with the parameters of torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.nn.levels import as_cast, live_rows, owned_entries, share
from ikbo_tree.ops.attention import self_target_attention, target_attention
from ikbo_tree.ops.memories import Memory, checked_lengths, checked_offsets, shape_of
from ikbo_tree.tree import BroadcastTree


class TreeTargetAttention(nn.MultiheadAttention):
    """Attention of each row to the histories of all its ancestors, in one softmax.

    Parameters are those of the flat `nn.MultiheadAttention(embed_dim, num_heads)`, which gets every
    row's ancestors' histories side by side. Keys and values are projected once a history, at its
    own level, and never copied.

    Args:
        embed_dim: E, of queries and histories.
        num_heads: H, divides E.
        level: the level of the queries.
        bias: whether the projections have one.
        device: of the parameters.
        dtype: of the parameters.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> attention = TreeTargetAttention(8, 2, level="item")
    >>> histories = {"user": torch.randn(2, 5, 8)}
    >>> attention(torch.randn(3, 8), histories, tree=tree).shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        level: str,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, bias=bias, batch_first=True, device=device, dtype=dtype
        )
        self.level = level

    @classmethod
    def from_flat(cls, flat: nn.MultiheadAttention, *, level: str) -> Self:
        """A module that shares the parameters of a flat one.

        Raises:
            ValueError: it has dropout, keys of another width than the queries, or keys of its own.
        """
        _check_flat_attention(flat)
        has_bias = flat.in_proj_bias is not None
        module = cls(flat.embed_dim, flat.num_heads, level=level, bias=has_bias, device="meta")
        share(module, flat)
        return module

    def to_flat(self) -> nn.MultiheadAttention:
        """The flat module, with the same parameters; `batch_first`."""
        has_bias = self.in_proj_bias is not None
        flat = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, bias=has_bias, batch_first=True, device="meta"
        )
        share(flat, self)
        return flat

    def forward(  # type: ignore[override]  # of many levels, not of three tensors
        self,
        query: Tensor,
        histories: Mapping[str, Tensor],
        *,
        tree: BroadcastTree,
        lengths: Mapping[str, Tensor] | None = None,
        offsets: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """What the histories say about each query.

        Args:
            query: [rows of the level, E], or [rows, n, E] for n queries a row.
            histories: for each level or table [rows, S, E] padded, or packed [total, E]. NaN where
                no row owns an entry is harmless.
            tree: the tree.
            lengths: [rows] of those padded ones that are not full.
            offsets: [rows + 1] of the packed ones.

        Returns:
            Like `query`. A row with nothing to attend to has the bias of the last projection; dead
            rows are zero.

        Raises:
            TreeError: see `ikbo_tree.target_attention`.
        """
        check_query(query, self.embed_dim)
        memories = _memories(histories, lengths or {}, offsets or {}, tree)
        one = query.dim() == 2
        x = live_rows(query.unsqueeze(1) if one else query, tree, self.level)
        q_weight, kv_weight = self.in_proj_weight.split([self.embed_dim, 2 * self.embed_dim])
        q_bias, kv_bias = None, None
        if self.in_proj_bias is not None:
            q_bias, kv_bias = self.in_proj_bias.split([self.embed_dim, 2 * self.embed_dim])
        q = _heads(F.linear(x, q_weight, q_bias), self.num_heads)
        given = []
        for memory in memories:
            k, v = F.linear(memory.k, kv_weight, kv_bias).chunk(2, dim=-1)
            given.append(_replaced(memory, *(_heads(y, self.num_heads) for y in (k, v))))
        with as_cast(query):
            found = target_attention(q, given, tree=tree, level=self.level)
        found = live_rows(self.out_proj(found.flatten(2)), tree, self.level)
        return found.squeeze(1) if one else found

    def extra_repr(self) -> str:
        """Sizes and the level of the queries."""
        return f"{self.embed_dim}, {self.num_heads}, level={self.level}"


class TreeTransformerBlock(nn.TransformerEncoderLayer):
    """A transformer layer over a history and, as its last position, each candidate below it.

    Parameters are those of the flat `nn.TransformerEncoderLayer`, which gets each candidate behind
    a copy of its history, under a mask: all positions see the history (up to themselves, if
    `causal`), none sees the candidate. So the history's part is the same for all candidates, and is
    done once; its keys and values serve both (`ikbo_tree.self_target_attention`).

    Args:
        embed_dim: E.
        num_heads: H, divides E.
        feed_forward: hidden width of the feed-forward network.
        of: the level or table of the histories.
        level: the level of the candidates.
        causal: whether an event sees only those before it, and itself.
        activation: `"relu"`, `"gelu"` or a function.
        norm_first: normalise before attention and feed-forward network, not after.
        layer_norm_eps: of the norms.
        device: of the parameters.
        dtype: of the parameters.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> block = TreeTransformerBlock(8, 2, 16, of="user", level="item")
    >>> x = block({"user": torch.randn(2, 5, 8), "item": torch.randn(3, 8)}, tree=tree)
    >>> x["user"].shape, x["item"].shape
    (torch.Size([2, 5, 8]), torch.Size([3, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feed_forward: int,
        *,
        of: str,
        level: str,
        causal: bool = False,
        activation: Any = "relu",
        norm_first: bool = False,
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            feed_forward,
            dropout=0.0,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            batch_first=True,
            norm_first=norm_first,
            device=device,
            dtype=dtype,
        )
        check_levels(of, level)
        self.of, self.level, self.causal = of, level, causal

    @classmethod
    def from_flat(
        cls, flat: nn.TransformerEncoderLayer, *, of: str, level: str, causal: bool = False
    ) -> Self:
        """A module that shares the parameters of a flat one.

        Raises:
            ValueError: it has dropout, or the two levels are one.
        """
        _check_flat_attention(flat.self_attn)
        if any(x.p for x in (flat.dropout, flat.dropout1, flat.dropout2)):
            raise ValueError("flat must have no dropout")
        module = cls(
            flat.self_attn.embed_dim,
            flat.self_attn.num_heads,
            flat.linear1.out_features,
            of=of,
            level=level,
            causal=causal,
            activation=flat.activation,
            norm_first=flat.norm_first,
            device="meta",
        )
        share(module, flat)
        return module

    def to_flat(self) -> nn.TransformerEncoderLayer:
        """The flat module, with the same parameters; `batch_first`."""
        flat = nn.TransformerEncoderLayer(
            self.self_attn.embed_dim,
            self.self_attn.num_heads,
            self.linear1.out_features,
            dropout=0.0,
            activation=self.activation,
            batch_first=True,
            norm_first=self.norm_first,
            device="meta",
        )
        share(flat, self)
        return flat

    def forward(  # type: ignore[override]  # of two levels, not of one tensor
        self,
        inputs: Mapping[str, Tensor],
        *,
        tree: BroadcastTree,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Both levels one layer further.

        Args:
            inputs: of `of` the histories [rows, S, E], or packed [total, E]; of `level` candidates
                [rows, E], or [rows, n, E] for n a row that do not see each other.
            tree: the tree.
            lengths: [rows of `of`], if padded and not full.
            offsets: [rows of `of` + 1], if packed.

        Returns:
            The same names and shapes. What no row owns in the histories is zero, so are dead rows.

        Raises:
            TreeError: other names; see `ikbo_tree.self_target_attention`.
        """
        memory = history_of(inputs, self.of, self.level, tree, lengths, offsets)
        own, target = memory.k, inputs[self.level]
        check_query(target, self.self_attn.embed_dim)
        one = target.dim() == 2
        target = live_rows(target.unsqueeze(1) if one else target, tree, self.level)
        if self.norm_first:
            a, b = self._attend(self.norm1(own), self.norm1(target), memory, tree)
            own, target = own + a, target + b
            own, target = (x + self._feed_forward(self.norm2(x)) for x in (own, target))
        else:
            a, b = self._attend(own, target, memory, tree)
            own, target = self.norm1(own + a), self.norm1(target + b)
            own, target = (self.norm2(x + self._feed_forward(x)) for x in (own, target))
        target = live_rows(target, tree, self.level)
        return {
            self.of: owned_entries(own, memory, tree),
            self.level: target.squeeze(1) if one else target,
        }

    def _attend(
        self, own: Tensor, target: Tensor, memory: Memory, tree: BroadcastTree
    ) -> tuple[Tensor, Tensor]:
        attention = self.self_attn
        width, heads = attention.embed_dim, attention.num_heads
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        q_self, k, v = (_heads(x, heads) for x in F.linear(own, weight, bias).chunk(3, dim=-1))
        q_bias = None if bias is None else bias[:width]
        q = _heads(F.linear(target, weight[:width], q_bias), heads)
        with as_cast(target):
            found = self_target_attention(
                q_self,
                q,
                k,
                v,
                tree=tree,
                level=self.level,
                of=self.of,
                lengths=memory.lengths,
                offsets=memory.offsets,
                causal=self.causal,
            )
        a, b = (attention.out_proj(x.flatten(-2)) for x in found[:2])
        return a, b

    def _feed_forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear2(self.activation(self.linear1(x)))
        return found

    def extra_repr(self) -> str:
        """The levels."""
        return f"of={self.of}, level={self.level}, causal={self.causal}"


def check_levels(of: str, level: str) -> None:
    """Raises a ValueError if the two are one."""
    if of == level:
        raise ValueError(f"of and level must differ; got {of!r} for both")


def _check_flat_attention(flat: nn.MultiheadAttention) -> None:
    if flat.dropout:
        raise ValueError(f"flat must have no dropout; got {flat.dropout}")
    if flat.in_proj_weight is None:
        raise ValueError("flat must have keys and values as wide as its queries")
    if flat.bias_k is not None or flat.add_zero_attn:
        raise ValueError("flat must have no keys of its own (add_bias_kv, add_zero_attn)")


def check_query(query: Tensor, width: int) -> None:
    """Raises a TreeError unless `query` is [rows, width] or [rows, n, width]."""
    if query.dim() not in (2, 3) or query.shape[-1] != width:
        rule = f"must have shape [rows, {width}] or [rows, n, {width}]"
        raise TreeError("query", rule, shape_of(query))


def history_of(
    inputs: Mapping[str, Tensor],
    of: str,
    level: str,
    tree: BroadcastTree,
    lengths: Tensor | None,
    offsets: Tensor | None,
) -> Memory:
    """The history among the inputs of two levels, k and v itself, zero where no row owns.

    Raises:
        TreeError: other names than the two; shapes, rows or values that do not fit.
    """
    if inputs.keys() != {of, level}:
        raise TreeError("inputs", f"must have the names {[of, level]}", str(list(inputs)))
    (found,) = _memories(
        {of: inputs[of]},
        {} if lengths is None else {of: lengths},
        {} if offsets is None else {of: offsets},
        tree,
    )
    return found


def _memories(
    histories: Mapping[str, Tensor],
    lengths: Mapping[str, Tensor],
    offsets: Mapping[str, Tensor],
    tree: BroadcastTree,
) -> list[Memory]:
    """One a history, k and v the history itself, with zeros where no row owns."""
    for argument, given in (("lengths", lengths), ("offsets", offsets)):
        if not given.keys() <= histories.keys():
            names = list(histories)
            raise TreeError(argument, f"must name histories: {names}", str(list(given)))
    found = []
    for name, x in histories.items():
        memory = Memory(name, x, x, lengths.get(name), offsets.get(name))
        packed = memory.offsets is not None
        if x.dim() != (2 if packed else 3) or (packed and memory.lengths is not None):
            rule = "must have shape [rows, S, E], or with offsets alone [total, E]"
            raise TreeError(f'histories["{name}"]', rule, shape_of(x))
        if packed:
            checked_offsets(f'offsets["{name}"]', memory, tree)
        else:
            tree.check(f'histories["{name}"]', x, name)
            checked_lengths(f'lengths["{name}"]', memory, tree)
        x = owned_entries(x, memory, tree)
        found.append(_replaced(memory, x, x))
    return found


def _replaced(memory: Memory, k: Tensor, v: Tensor) -> Memory:
    return Memory(memory.level, k, v, memory.lengths, memory.offsets)


def _heads(x: Tensor, heads: int) -> Tensor:
    found: Tensor = x.unflatten(-1, (heads, -1))
    return found
