"""Workloads of compositions and modules, on trees and flat; see `bench_compositions.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ikbo_tree as ikbo
from ikbo_tree.nn import (
    HSTULayer,
    TreeCrossNet,
    TreeDotInteraction,
    TreeHSTU,
    TreeLinearCompression,
    TreeMLP,
    TreeTargetAttention,
    TreeTransformerBlock,
)

ITEMS, RATIO, HEADS = 2048, 64, 4

VENDORS = 4
"""Vendors a user, where there are any."""

EVENTS, MODULE_EVENTS = 64, 32
"""Of a history that ops read, and modules."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """A composition or module at one size.

    Attributes:
        name: as results files have it, less the sizes all have.
        shapes: of a row of each float input, by the input's name.
        ours: `(inputs, tree)` -> the items' result.
        flat: `(inputs at the items)` -> the same.
        levels: of the inputs; default their names.
        weights: shapes of inputs without rows.
        ids: of each input of ids the level, the shape of a row and the vocabulary.
        module: whose parameters have gradients as well.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    ours: Callable[[Tensors, ikbo.BroadcastTree], Tensor]
    flat: Callable[[Tensors], Tensor]
    levels: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ids: Mapping[str, tuple[str, tuple[int, ...], int]] = field(default_factory=dict)
    module: nn.Module | None = None

    @property
    def family(self) -> str:
        """The op or module."""
        return self.name.split("-")[0]

    @property
    def title(self) -> str:
        """With the sizes all have."""
        family, _, sizes = self.name.partition("-")
        return f"{family}-b{ITEMS}-r{RATIO}" + (f"-{sizes}" if sizes else "")


def make_tree(vendors: bool) -> ikbo.BroadcastTree:
    """Even counts: compositions are studied here, not how uneven they may be."""
    users = ITEMS // RATIO
    if not vendors:
        return ikbo.BroadcastTree.from_counts({"item": [RATIO] * users}, root="user")
    counts = {"vendor": [VENDORS] * users, "item": [RATIO // VENDORS] * (users * VENDORS)}
    return ikbo.BroadcastTree.from_counts(counts, root="user")


def _side_by_side(x: Tensors) -> Tensor:
    return torch.cat([x[n] for n in ("user", "vendor", "item") if n in x], dim=1)


def _lists(x: Tensor) -> Tensor:
    """[items] of even lists as [users, items]."""
    return x.view(-1, RATIO)


def _elementwise(width: int) -> list[Workload]:
    levels = {"user": (width,), "vendor": (width,), "item": (width,)}
    pair = {"item": (width,), "user": (width,)}
    at = {"level": "item", "of": "user"}
    return [
        Workload(
            f"add-k{width}",
            levels,
            lambda x, tree: ikbo.add(x, tree=tree),
            lambda x: x["user"] + x["vendor"] + x["item"],
        ),
        Workload(
            f"mul-k{width}",
            levels,
            lambda x, tree: ikbo.mul(x, tree=tree),
            lambda x: x["user"] * x["vendor"] * x["item"],
        ),
        Workload(
            f"gate-k{width}",
            pair,
            lambda x, tree: ikbo.gate(x["item"], x["user"], tree=tree, **at),
            lambda x: x["item"] * x["user"].sigmoid(),
        ),
        Workload(
            f"film-k{width}",
            {**pair, "shift": (width,)},
            lambda x, tree: ikbo.film(x["item"], x["user"], x["shift"], tree=tree, **at),
            lambda x: torch.addcmul(x["shift"], x["item"], x["user"]),
            levels={"shift": "user"},
        ),
    ]


def _norms(width: int) -> list[Workload]:
    shapes, total = {"user": (width,), "item": (width,)}, 2 * width
    return [
        Workload(
            f"layer_norm-k{width}",
            shapes,
            lambda x, tree: ikbo.layer_norm(_rows(x), x["weight"], x["bias"], tree=tree),
            lambda x: F.layer_norm(_side_by_side(x), (total,), x["weight"], x["bias"]),
            weights={"weight": (total,), "bias": (total,)},
        ),
        Workload(
            f"rms_norm-k{width}",
            shapes,
            lambda x, tree: ikbo.rms_norm(_rows(x), x["weight"], tree=tree),
            lambda x: F.rms_norm(_side_by_side(x), (total,), x["weight"], 1e-5),
            weights={"weight": (total,)},
        ),
    ]


def _rows(x: Tensors) -> dict[str, Tensor]:
    return {n: x[n] for n in ("user", "vendor", "item") if n in x}


def _flat_dots(x: Tensors) -> Tensor:
    z = _side_by_side(x)
    i, j = torch.tril_indices(z.shape[1], z.shape[1], -1)
    return torch.bmm(z, z.transpose(1, 2))[:, i, j]


def _flat_machine(x: Tensors) -> Tensor:
    z = _side_by_side(x)
    return (z.sum(1).square() - z.square().sum(1)) / 2


def _interactions(fields: int, width: int, features: int) -> list[Workload]:
    shapes = {"user": (fields, width), "item": (fields, width)}
    total = 2 * features

    def vectors(x: Tensors) -> list[ikbo.CrossLayer]:
        return [ikbo.VectorCross(w) for w in x["weight"].unbind()]

    def flat_vectors(x: Tensors) -> Tensor:
        x0 = y = _side_by_side(x)
        for w in x["weight"].unbind():
            y = x0 * (y @ w).unsqueeze(1) + y
        return y

    dots = TreeDotInteraction()
    return [
        Workload(
            f"dot_interaction-f{fields}-d{width}",
            shapes,
            lambda x, tree: dots(x, tree=tree),
            _flat_dots,
        ),
        Workload(
            f"factorization_machine-f{fields}-d{width}",
            shapes,
            lambda x, tree: ikbo.factorization_machine(x, tree=tree),
            _flat_machine,
        ),
        Workload(
            f"cross-k{features}",
            {"user": (features,), "item": (features,)},
            lambda x, tree: ikbo.cross(_rows(x), vectors(x), tree=tree),
            flat_vectors,
            weights={"weight": (3, total)},
        ),
    ]


def _histories(width: int) -> list[Workload]:
    user = {"level": "user"}

    def pooled(x: Tensors, tree: ikbo.BroadcastTree) -> Tensor:
        found = ikbo.pool(x["user"], tree=tree, **user)
        return ikbo.broadcast(found, tree=tree, level="user", to="item")

    def attended(x: Tensors, tree: ikbo.BroadcastTree) -> Tensor:
        found = ikbo.attention_pool(x["user"], x["scores"], tree=tree, **user)
        return ikbo.broadcast(found, tree=tree, level="user", to="item")

    def looked_up(x: Tensors, tree: ikbo.BroadcastTree) -> Tensor:
        found = ikbo.embedding(x["ids"], x["weight"], tree=tree, **user)
        return ikbo.broadcast(found, tree=tree, level="user", to="item")

    return [
        Workload(f"pool-s{EVENTS}-d{width}", {"user": (EVENTS, width)}, pooled,
                 lambda x: x["user"].mean(1)),
        Workload(f"attention_pool-s{EVENTS}-d{width}",
                 {"user": (EVENTS, width), "scores": (EVENTS,)}, attended,
                 lambda x: torch.einsum("bs,bsd->bd", x["scores"].softmax(1), x["user"]),
                 levels={"scores": "user"}),
        Workload(f"embedding-s8-d{width}", {}, looked_up,
                 lambda x: F.embedding(x["ids"], x["weight"]),
                 weights={"weight": (10_000, width)}, ids={"ids": ("user", (8,), 10_000)}),
    ]  # fmt: skip


def _silu(width: int) -> list[Workload]:
    head = (HEADS, width // HEADS)
    scale = head[1] ** -0.5

    def ours(x: Tensors, tree: ikbo.BroadcastTree) -> Tensor:
        memory = {"user": (x["k"], x["v"])}
        return ikbo.silu_attention(x["item"], memory, tree=tree, level="item", length=EVENTS)

    def flat(x: Tensors) -> Tensor:
        weights = F.silu(torch.einsum("bnhd,bshd->bhns", x["item"], x["k"]) * scale) / EVENTS
        return torch.einsum("bhns,bshd->bnhd", weights, x["v"])

    shapes = {"item": (1, *head), "k": (EVENTS, *head), "v": (EVENTS, *head)}
    name = f"silu_attention-s{EVENTS}-d{width}"
    return [Workload(name, shapes, ours, flat, levels={"k": "user", "v": "user"})]


def _ranking() -> list[Workload]:
    at = {"level": "item", "of": "user"}
    scores: dict[str, tuple[int, ...]] = {"item": ()}
    ids = {"labels": ("item", (), 2)}

    def flat_pairs(x: Tensors) -> Tensor:
        s, y = _lists(x["item"]), _lists(x["labels"])
        wins = y.unsqueeze(2) > y.unsqueeze(1)
        losses = F.softplus(s.unsqueeze(1) - s.unsqueeze(2)).masked_fill(~wins, 0)
        return losses.sum() / wins.sum().clamp(min=1)

    def flat_lists(x: Tensors) -> Tensor:
        y = _lists(x["labels"]).float()
        losses = -(y * _lists(x["item"]).log_softmax(1)).sum(1)
        return losses.sum() / y.any(1).sum().clamp(min=1)

    return [
        Workload("segment_topk-k10", scores,
                 lambda x, tree: ikbo.segment_topk(x["item"], 10, tree=tree, **at)[0],
                 lambda x: _lists(x["item"]).topk(10)[0]),
        Workload("listwise_softmax_loss", scores,
                 lambda x, tree: ikbo.listwise_softmax_loss(
                     x["item"], x["labels"], tree=tree, **at), flat_lists, ids=ids),
        Workload("pairwise_logistic_loss", scores,
                 lambda x, tree: ikbo.pairwise_logistic_loss(
                     x["item"], x["labels"], tree=tree, **at), flat_pairs, ids=ids),
    ]  # fmt: skip


def _linear_modules(width: int, fields: int) -> list[Workload]:
    mlp = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 64))
    compress = nn.Linear(2 * fields, 32, bias=False)
    crosses = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(2))
    widths = {"user": width, "item": width}
    tree_mlp = TreeMLP.from_flat(mlp, widths)
    tree_compress = TreeLinearCompression.from_flat(compress, {"user": fields, "item": fields})
    tree_crosses = TreeCrossNet.from_flat(crosses, widths)
    features = {name: (k,) for name, k in widths.items()}

    def crossed(x: Tensors) -> Tensor:
        x0 = y = _side_by_side(x)
        for layer in crosses:
            y = x0 * layer(y) + y
        return y

    return [
        Workload(f"TreeMLP-k{width}", features, lambda x, tree: tree_mlp(x, tree=tree),
                 lambda x: mlp(_side_by_side(x)), module=mlp),
        Workload(f"TreeLinearCompression-f{fields}-d64",
                 {"user": (fields, 64), "item": (fields, 64)},
                 lambda x, tree: tree_compress(x, tree=tree),
                 lambda x: compress.weight @ _side_by_side(x), module=compress),
        Workload(f"TreeCrossNet-k{width}", features, lambda x, tree: tree_crosses(x, tree=tree),
                 crossed, module=crosses),
    ]  # fmt: skip


def _attention_modules(width: int) -> list[Workload]:
    attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
    block = nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout=0.0, batch_first=True)
    hstu = HSTULayer(width, HEADS, MODULE_EVENTS)
    tree_attention = TreeTargetAttention.from_flat(attention, level="item")
    tree_block = TreeTransformerBlock.from_flat(block, of="user", level="item")
    tree_hstu = TreeHSTU.from_flat(hstu, of="user", level="item")
    hidden = torch.zeros(MODULE_EVENTS + 1, MODULE_EVENTS + 1, dtype=torch.bool)
    hidden[:, MODULE_EVENTS] = True  # nobody sees the candidate, at the end
    shapes = {"user": (MODULE_EVENTS, width), "item": (width,)}

    def attended(x: Tensors) -> Tensor:
        query, events = x["item"].unsqueeze(1), x["user"]
        found: Tensor = attention(query, events, events, need_weights=False)[0]
        return found.squeeze(1)

    def transformed(x: Tensors) -> Tensor:
        sequence = torch.cat([x["user"], x["item"].unsqueeze(1)], dim=1)
        found: Tensor = block(sequence, src_mask=hidden)
        return found[:, MODULE_EVENTS]

    sizes = f"s{MODULE_EVENTS}-d{width}"
    return [
        Workload(f"TreeTargetAttention-{sizes}", shapes,
                 lambda x, tree: tree_attention(x["item"], {"user": x["user"]}, tree=tree),
                 attended, module=attention),
        Workload(f"TreeTransformerBlock-{sizes}", shapes,
                 lambda x, tree: tree_block(x, tree=tree)["item"], transformed, module=block),
        Workload(f"TreeHSTU-{sizes}", shapes, lambda x, tree: tree_hstu(x, tree=tree)["item"],
                 lambda x: hstu(x["user"], x["item"])[1], module=hstu),
    ]  # fmt: skip


def workloads() -> list[Workload]:
    """All of them, parameters drawn anew."""
    torch.manual_seed(0)
    return [
        *_elementwise(512),
        *_norms(256),
        *_interactions(16, 64, 256),
        *_histories(64),
        *_silu(64),
        *_ranking(),
        *_linear_modules(512, 64),
        *_attention_modules(64),
    ]
