"""Attention with keys and values of a coarser level, whole and written by hand.

`limit` says that nobody copies a history to the items: a user's keys are 7 x 8 = 56 numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from rewrite_cases.case import Cases, linear, parameter

case = CASES = Cases("attention")
sdpa = F.scaled_dot_product_attention


def heads(x, n=2):
    """[B, L, n * d] to [B, n, L, d]."""
    return x.view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)


def rows(x):
    """[B, n, L, d] back to [B, L, n * d]."""
    return x.transpose(1, 2).flatten(2)


def by_hand(q, k, v, bias=0.0):
    """softmax(q k' / sqrt(d)) v, one matmul after another."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
    return scores.softmax(-1) @ v


def before(lengths, n):
    """[B, n], true in front of each length."""
    return torch.arange(n, device=lengths.device) < lengths[:, None]


def encoder(batch_first=True, norm_first=False):
    return lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=batch_first,
                                              norm_first=norm_first)  # fmt: skip


def mha(batch_first=True):
    return lambda: nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=batch_first)


# fmt: off
# scaled_dot_product_attention; one query row an item.
case("sdpa", lambda m, hist, q, idx: rows(sdpa(heads(q[:, None]), heads(hist[idx]),
     heads(hist[idx])))[:, 0], limit=32)
case("sdpa_one_head", lambda m, hist, q, idx: sdpa(q[:, None], hist[idx], hist[idx])[:, 0],
     limit=32)
case("sdpa_queries", lambda m, hist, qs, idx: rows(sdpa(heads(qs), heads(hist[idx]),
     heads(hist[idx]))), limit=48)
case("sdpa_projected", lambda m, hist, q, idx: rows(sdpa(heads(m.q(q)[:, None]), heads(m.k(
     hist[idx])), heads(m.v(hist[idx]))))[:, 0], q=linear(8, 8), k=linear(8, 8), v=linear(8, 8),
     split="linear", limit=32)
case("sdpa_projected_first", lambda m, hist, q, idx: rows(sdpa(heads(q[:, None]), heads(m.k(hist))[
     idx], heads(m.v(hist))[idx]))[:, 0], k=linear(8, 8), v=linear(8, 8), sunk="linear", limit=32)
case("sdpa_packed_kv", lambda m, hist, q, idx: (lambda k, v: rows(sdpa(heads(q[:, None]), heads(k),
     heads(v)))[:, 0])(*m.kv(hist[idx]).chunk(2, -1)), kv=linear(8, 16), sunk="linear", limit=32)
case("sdpa_scale", lambda m, hist, q, idx: rows(sdpa(heads(q[:, None]), heads(hist[idx]),
     heads(hist[idx]), scale=0.7))[:, 0], limit=32)
case("sdpa_grouped", lambda m, hist, q16, idx: rows(sdpa(heads(q16[:, None], 4), heads(hist[idx]),
     heads(hist[idx]), enable_gqa=True))[:, 0], limit=40)
case("sdpa_float_mask", lambda m, hist, recent, q, idx: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]),
     heads(hist[idx]), recent[idx][:, None, None]))[:, 0], limit=32)
case("sdpa_mask_of_user", lambda m, hist, valid, q, idx: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]), heads(hist[idx]), valid[idx][:, None, None]))[:, 0], limit=32)
case("sdpa_lengths", lambda m, hist, lengths, q, idx: rows(sdpa(heads(q[:, None]), heads(hist[idx]),
     heads(hist[idx]), before(lengths, 7)[idx][:, None, None]))[:, 0], limit=32)
case("sdpa_lengths_below", lambda m, hist, lengths, q, idx: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]), heads(hist[idx]), before(lengths[idx], 7)[:, None, None]))[:, 0], limit=32)
case("sdpa_empty_history", lambda m, hist, short, q, idx: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]), heads(hist[idx]), before(short, 7)[idx][:, None, None]))[:, 0])
case("sdpa_mask_of_item", lambda m, hist, ivalid, q, idx: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]), heads(hist[idx]), ivalid[:, None, None]))[:, 0])
case("sdpa_mask_of_both", lambda m, hist, valid, ivalid, q, idx: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]), heads(hist[idx]), (valid[idx] | ivalid)[:, None, None]))[:, 0])
case("sdpa_mask_of_vendor", lambda m, hist, vvalid, q, idx, iv: rows(sdpa(heads(q[:, None]),
     heads(hist[idx]), heads(hist[idx]), vvalid[iv][:, None, None]))[:, 0])
case("sdpa_constant_bias", lambda m, hist, q, idx: rows(sdpa(heads(q[:, None]), heads(hist[idx]),
     heads(hist[idx]), m.bias))[:, 0], bias=parameter(2, 1, 7))
case("sdpa_causal_queries", lambda m, hist, qs, idx: rows(sdpa(heads(qs), heads(hist[idx]),
     heads(hist[idx]), is_causal=True)))
case("sdpa_of_vendor", lambda m, vhist, q, iv: rows(sdpa(heads(q[:, None]), heads(vhist[iv]),
     heads(vhist[iv])))[:, 0], limit=40)
case("sdpa_vendor_over_user", lambda m, hist, v, i8, vu, iv: rows(sdpa(heads(m.q(v)[:, None]),
     heads(
     hist[vu]), heads(hist[vu])))[:, 0][iv] + i8, q=linear(6, 8))
case("sdpa_two_memories", lambda m, hist, vhist, q, idx, iv: (lambda kv: rows(sdpa(heads(q[:,
     None]),
     heads(kv), heads(kv)))[:, 0])(torch.cat([hist[idx], vhist[iv]], 1)))
case("sdpa_same_level_memories", lambda m, hist, hist2, q, idx: (lambda kv: rows(sdpa(heads(q[
     :, None]), heads(kv), heads(kv)))[:, 0])(torch.cat([hist[idx], hist2[idx]], 1)), sunk="cat")
case("sdpa_with_itself", lambda m, hist, q, idx: (lambda kv: rows(sdpa(heads(q[:, None]), heads(kv),
     heads(kv)))[:, 0])(torch.cat([hist[idx], q[:, None]], 1)))
case("sdpa_values_of_item", lambda m, hist, q, idx: rows(sdpa(heads(q[:, None]), heads(hist[idx]),
     heads(hist[idx] * q[:, None])))[:, 0])
case("sdpa_keys_of_item", lambda m, u8, qs, idx: rows(sdpa(heads(u8.exp()[idx][:, None]), heads(qs),
     heads(qs)))[:, 0], sunk="exp", kept="scaled_dot_product_attention")
case("sdpa_self", lambda m, hist, q, idx: rows(sdpa(heads(hist[idx]), heads(hist[idx]), heads(
     hist[idx]))).mean(1) * q, sunk="scaled_dot_product_attention mean")
case("sdpa_self_causal", lambda m, hist, q, idx: rows(sdpa(heads(hist[idx]), heads(hist[idx]),
     heads(
     hist[idx]), is_causal=True)).mean(1) * q, sunk="scaled_dot_product_attention mean")
case("sdpa_self_masked", lambda m, hist, valid, q, idx: rows(sdpa(heads(hist[idx]),
     heads(hist[idx]),
     heads(hist[idx]), valid[idx][:, None, None])).mean(1) * q,
     sunk="scaled_dot_product_attention mean")
case("sdpa_learnt_query", lambda m, hist, q, idx: rows(sdpa(heads(m.q.expand(q.shape[0], 1, 8)),
     heads(
     hist[idx]), heads(hist[idx])))[:, 0] * q, q=parameter(1, 1, 8))
case("sdpa_items_as_sequence", lambda m, u8, q, idx: sdpa((u8[idx] + q)[None], q[None], q[None])[0],
     kept="scaled_dot_product_attention")
case("sdpa_over_users", lambda m, u8, q, idx: sdpa(q[None], u8[None], u8[None])[0] + u8[idx])

# nn.MultiheadAttention and whole layers.
case("mha", lambda m, hist, q, idx: m.f(q[:, None], hist[idx], hist[idx], need_weights=False)[0][:,
     0],
     f=mha(), split="linear", limit=32)
case("mha_weights", lambda m, hist, q, idx: m.f(q[:, None], hist[idx], hist[idx])[1][:, 0], f=mha())
case("mha_both", lambda m, hist, q, idx: m.f(q[:, None], hist[idx], hist[idx],
     average_attn_weights=False), f=mha(), split="linear")
case("mha_padding", lambda m, hist, valid, q, idx: m.f(q[:, None], hist[idx], hist[idx],
     key_padding_mask=~valid[idx], need_weights=False)[0][:, 0], f=mha(), split="linear", limit=32)
case("mha_batch_second", lambda m, hist, q, idx: m.f(q[None], hist[idx].transpose(0, 1), hist[idx]
     .transpose(0, 1), need_weights=False)[0][0], f=mha(False), split="linear", limit=32)
case("mha_batch_second_padding", lambda m, hist, valid, qs, idx: m.f(qs.transpose(0, 1), hist[idx]
     .transpose(0, 1), hist[idx].transpose(0, 1), key_padding_mask=~valid[idx],
     need_weights=False)[0],
     f=mha(False), split="linear", limit=48)
case("mha_self", lambda m, hist, q, idx: m.f(hist[idx], hist[idx], hist[idx], need_weights=False)[0]
     .mean(1) * q, f=mha(), sunk="linear mean")
case("mha_of_item", lambda m, u8, qs, idx: m.f(u8[idx][:, None], qs, qs, need_weights=False)[0][:,
     0],
     f=mha(), split="linear", kept="linear")
case("encoder", lambda m, hist, q, idx: m.f(hist[idx]).mean(1) * q, f=encoder(),
     sunk="linear layer_norm relu mean")
case("encoder_padding", lambda m, hist, valid, q, idx: m.f(hist[idx],
     src_key_padding_mask=~valid[idx])
     .mean(1) * q, f=encoder(), sunk="linear layer_norm relu mean")
case("encoder_first", lambda m, hist, q, idx: m.f(hist)[idx][:, 0] * q, f=encoder(norm_first=True),
     sunk="linear layer_norm relu")
case("encoder_batch_second", lambda m, hist, q, idx: m.f(hist[idx].transpose(0, 1)).mean(0) * q,
     f=encoder(False), sunk="linear layer_norm relu mean")
case("encoder_with_item", lambda m, hist, q, idx: m.f(torch.cat([hist[idx], q[:, None]], 1))[:, -1],
     f=encoder())
case("decoder", lambda m, hist, qs, idx: m.f(qs, hist[idx]), split="linear",
     f=lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True))

# By hand.
case("hand", lambda m, hist, q, idx: by_hand(q[:, None], hist[idx], hist[idx])[:, 0], limit=32)
case("hand_heads", lambda m, hist, q, idx: rows(by_hand(heads(q[:, None]), heads(hist[idx]), heads(
     hist[idx])))[:, 0], limit=32)
case("hand_bias", lambda m, hist, recent, q, idx: by_hand(q[:, None], hist[idx], hist[idx],
     recent[idx][:, None])[:, 0], limit=32)
case("hand_masked", lambda m, hist, valid, q, idx: ((q[:, None] @ hist[idx].mT).masked_fill(
     ~valid[idx][:, None], -math.inf).softmax(-1) @ hist[idx])[:, 0], limit=32)
case("hand_bmm", lambda m, hist, q, idx: torch.bmm(torch.bmm(q[:, None], hist[idx].transpose(1, 2))
     .softmax(2), hist[idx]).squeeze(1), limit=32)
case("hand_einsum", lambda m, hist, q, idx: torch.einsum("bl,bld->bd", torch.einsum("bd,bld->bl", q,
     hist[idx]).softmax(-1), hist[idx]), limit=32)
case("hand_products", lambda m, hist, q, idx: ((q[:, None] * hist[idx]).sum(-1).softmax(1)[...,
     None]
     * hist[idx]).sum(1))
case("hand_sigmoid", lambda m, hist, q, idx: (q[:, None] @ hist[idx].mT).sigmoid() @ hist[idx])
case("hand_silu_scores", lambda m, hist, recent, q, idx: (F.silu(q[:, None] @ m.k(hist[idx]).mT
     + recent[idx][:, None]) / 7) @ m.v(hist[idx]), k=linear(8, 8), v=linear(8, 8), split="linear")
case("hand_linear_attention", lambda m, hist, q, idx: (F.elu(q)[:, None] @ (F.elu(hist[idx]).mT
     @ hist[idx]))[:, 0], split="elu matmul")
case("din", lambda m, hist, q, idx: (m.f(torch.cat([q[:, None].expand_as(hist[idx]), hist[idx],
     q[:, None] - hist[idx], q[:, None] * hist[idx]], -1)) * hist[idx]).sum(1), split="linear",
     f=lambda: nn.Sequential(nn.Linear(32, 8), nn.Sigmoid(), nn.Linear(8, 1)))
case("din_softmax", lambda m, hist, lengths, q, idx: (m.f(torch.cat([hist[idx], q[:, None].expand(
     -1, 7, -1)], -1)).squeeze(-1).masked_fill(~before(lengths, 7)[idx], -1e9).softmax(1)[:, None]
     @ hist[idx])[:, 0], f=linear(16, 1), split="linear")

# Pooled histories.
case("pool_mean", lambda m, hist, q, idx: hist[idx].mean(1) * q, sunk="mean")
case("pool_masked", lambda m, hist, valid, q, idx: (hist[idx] * valid[idx].unsqueeze(-1)).sum(1)
     / valid[idx].sum(1, keepdim=True) * q, sunk="sum div", split="mul")
case("pool_lengths", lambda m, hist, lengths, q, idx: (hist[idx] * before(lengths[idx], 7)[...,
     None])
     .sum(1) / lengths[idx][:, None] + q, sunk="lt mul sum div")
case("pool_short", lambda m, hist, short, q, idx: hist[idx].masked_fill(
     ~before(short, 7)[idx][..., None], 0).sum(1) / short[idx].clamp(min=1)[:, None] + q,
     sunk="masked_fill sum clamp div")
case("pool_max", lambda m, hist, valid, q, idx: hist[idx].masked_fill(~valid[idx][..., None],
     -math.inf).amax(1) + q, sunk="masked_fill amax")
case("pool_learnt", lambda m, hist, q, idx: (m.f(hist[idx]).softmax(1) * hist[idx]).sum(1) + q,
     f=linear(8, 1), sunk="linear softmax mul sum")
case("pool_last", lambda m, hist, lengths, q, idx: hist[idx].gather(1, (lengths[idx] - 1)[:, None,
     None]
     .expand(-1, 1, 8)).squeeze(1).exp() + q, sunk="exp")
case("pool_decay", lambda m, hist, recent, q, idx: torch.einsum("bl,bld->bd",
     recent[idx].softmax(1),
     hist[idx]) + q, sunk="softmax einsum")
case("pool_by_item", lambda m, hist, ivalid, q, idx: (hist[idx].exp() * ivalid[...,
     None]).sum(1) + q,
     sunk="exp")
case("positions", lambda m, hist, q, idx: (hist[idx] + m.p).tanh().sum(1) * q, p=parameter(7, 8),
     sunk="add tanh sum")
case("history_times_item", lambda m, hist, q, idx: (hist[idx].tanh() @ q[..., None])[...,
     0].amax(1),
     sunk="tanh", kept="matmul amax")
