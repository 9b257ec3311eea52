"""Look-ups in vocabularies: once a coarse row, and never a whole vocabulary for a few ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rewrite_cases.case import Cases, linear, parameter
from rewrite_cases.inputs import WORDS

case = CASES = Cases("embeddings")


def table(width=6, **options):
    return lambda: nn.Embedding(WORDS, width, **options)


def bag(mode):
    return lambda: nn.EmbeddingBag(WORDS, 6, mode=mode)


# fmt: off
case("embedding", lambda m, uid, i, idx: m.e(uid[idx]) + i, e=table(), sunk="embedding")
case("embedding_functional", lambda m, uid, i, idx: F.embedding(uid[idx], m.w) + i,
     w=parameter(WORDS, 6), sunk="embedding")
case("embedding_first", lambda m, uid, i, idx: m.e(uid)[idx].exp() + i, e=table(),
     sunk="embedding exp")
case("embedding_padding", lambda m, ids, i, idx: m.e(ids[idx]).sum(1) + i, e=table(padding_idx=0),
     sunk="embedding sum")
case("embedding_history", lambda m, ids, i, idx: m.e(ids[idx]).mean(1) + i, e=table(),
     sunk="embedding mean")
case("embedding_flat", lambda m, pos, i, idx: m.f(m.e(pos[idx]).flatten(1)) + i, e=table(),
     f=linear(12, 6), sunk="embedding linear")
case("embedding_of_vendor", lambda m, vid, i, iv: m.e(vid[iv]).exp() + i, e=table(),
     sunk="embedding@vendor exp@vendor")
case("embedding_three_levels", lambda m, uid, vid, iid, idx, iv: m.f(torch.cat([m.e(uid[idx]),
     m.g(vid[iv]), m.h(iid)], 1)), e=table(24), g=table(24), h=table(8), f=linear(56, 8),
     split="embedding embedding@vendor linear linear@vendor", limit=8)
case("one_table_for_all", lambda m, uid, iid, idx: (m.e(uid[idx]) * m.e(iid)).sum(1), e=table(),
     split="embedding", kept="embedding")
case("weight_by_index", lambda m, uid, i, idx: m.w[uid[idx]].exp() + i, w=parameter(WORDS, 6),
     sunk="exp")
case("weight_by_index_select", lambda m, uid, i, idx: m.w.index_select(0, uid[idx]).exp() + i,
     w=parameter(WORDS, 6), sunk="exp")
case("weight_column", lambda m, uid, i, idx: m.w[:, uid[idx]].t().exp() + i, w=parameter(6, WORDS),
     sunk="exp")
case("bag_sum", lambda m, ids, i, idx: m.e(ids[idx]) + i, e=bag("sum"), sunk="embedding_bag")
case("bag_mean", lambda m, ids, i, idx: m.e(ids[idx]) * i, e=bag("mean"), sunk="embedding_bag")
case("bag_max", lambda m, ids, i, idx: m.e(ids[idx]) + i, e=bag("max"), sunk="embedding_bag")
case("bag_weighted", lambda m, ids, recent, i, idx: m.e(ids[idx],
     per_sample_weights=recent[idx]) + i,
     e=bag("sum"), sunk="embedding_bag")
case("bag_offsets_of_items", lambda m, uid, i, idx: F.embedding_bag(uid[idx], m.w, torch.arange(
     i.shape[0])) + i, w=parameter(WORDS, 6))
case("one_hot", lambda m, uid, i, idx: F.one_hot(uid[idx], WORDS).to(i.dtype) @ m.w + i,
     w=parameter(WORDS, 6), sunk="matmul")
case("bucketize", lambda m, u, i, idx: m.e(torch.bucketize(u[idx], m.at)).mean(1) + i, e=table(),
     at=lambda: torch.linspace(-2, 2, WORDS - 1), sunk="bucketize embedding mean")
case("searchsorted", lambda m, u, i, idx: torch.searchsorted(m.at, u[idx]) * i,
     at=lambda: torch.linspace(-2, 2, 9), sunk="searchsorted")
case("hashed", lambda m, un, i, idx: m.e((un[idx] * 31 + 7) % WORDS).sum(1) + i, e=table(),
     sunk="remainder embedding sum")
case("crossed", lambda m, uid, iid, idx: m.e((uid[idx] * 7 + iid) % WORDS), e=table(),
     sunk="mul", kept="remainder embedding")
case("stacked_tables", lambda m, pos, i, idx: m.e(pos[idx] + m.first).flatten(1)[:, :6] + i,
     e=lambda: nn.Embedding(12, 6), first=lambda: torch.tensor([0, 6]), sunk="embedding")
case("clamped_ids", lambda m, un, i, idx: m.e(un[idx].clamp(0, WORDS - 1)).sum(1) + i, e=table(),
     sunk="clamp embedding sum")
case("unknown_ids", lambda m, un, i, idx: m.e(torch.where(un[idx] < WORDS, un[idx], 0)).sum(1) + i,
     e=table(), sunk="lt where embedding sum")
case("position_table", lambda m, ids, i,
     idx: (m.e(ids[idx]) + m.p(torch.arange(7))).tanh().sum(1) + i,
     e=table(), p=lambda: nn.Embedding(7, 6), sunk="tanh sum")

# A vocabulary is no level: its rows are more than the ids, whatever may follow.
case("vocabulary_of_item", lambda m, iid, u, idx: torch.exp(m.e(iid)) + u[idx].tanh(), e=table(),
     sunk="tanh", kept="exp")
case("vocabulary_by_index", lambda m, iid, u, idx: torch.relu(m.w[iid]) * u[idx],
     w=parameter(WORDS, 6),
     kept="relu")
case("vocabulary_of_user", lambda m, uid, i, idx: torch.exp(m.e(uid))[idx] * i, e=table(),
     sunk="exp")
case("vocabulary_linear", lambda m, iid, uw, idx: m.f(torch.cat([uw[idx], m.e(iid)], 1)), e=table(),
     f=linear(30, 8), split="linear", kept="embedding", limit=8)
case("computed_vocabulary", lambda m, uid, i, idx: torch.tanh(m.w @ m.a)[uid[idx]].exp() + i,
     w=parameter(WORDS, 4), a=parameter(4, 6), sunk="exp")
