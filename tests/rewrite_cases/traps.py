"""What goes wrong easily: sizes in arithmetic, writes in place, and models to refuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rewrite_cases.case import Cases, linear, parameter

case = CASES = Cases("traps")

# fmt: off
# Sizes of the batch as numbers: they stay those of the items.
case("divided_by_rows", lambda m, u, i, idx: (lambda x: x / x.shape[0] + i)(u[idx].exp()),
     sunk="exp")
case("rows_times", lambda m, u, i, idx: u[idx] * u[idx].size(0) + i.shape[0])
case("divided_by_users", lambda m, u, i, idx: (u / u.shape[0])[idx].exp() + i, sunk="exp div")
case("mean_by_hand", lambda m, u, i, idx: i * (u[idx].sum(0) / u[idx].shape[0]), kept="sum")
case("mean_by_len", lambda m, u, i, idx: i * (u[idx].sum(0) / len(u[idx])), kept="sum",
     not_exportable="Constraints violated")
case("divided_by_count", lambda m, u, i, idx: u[idx].exp() / u[idx].numel() + i, sunk="exp")
case("ratio_of_sizes", lambda m, u, i, idx: u[idx].exp() * (i.shape[0] / u.shape[0]), sunk="exp")
case("new_zeros", lambda m, u, i, idx: (lambda x: torch.cat([x.exp(), x.new_zeros(x.shape[0], 2)],
     1)
     .sum(1, keepdim=True) + i)(u[idx]), sunk="exp")
case("new_ones_by_item", lambda m, u, i, idx: torch.cat([u[idx].exp(), u.new_ones(i.shape[0], 1),
     i],
     1), sunk="exp")
case("torch_zeros", lambda m, u, i, idx: torch.maximum(u[idx], torch.zeros(u[idx].shape,
     dtype=u.dtype))
     + i)
case("row_numbers", lambda m, u, i, idx: u[idx].exp() + torch.arange(u[idx].shape[0])[:, None] * i,
     sunk="exp")
case("row_numbers_first", lambda m, u, i, idx: (u[idx] + torch.arange(i.shape[0])[:,
     None] / 8).sin()
     + i, kept="sin")
case("user_numbers", lambda m, u, i, idx: (u + torch.arange(u.shape[0])[:, None])[idx].sin() + i,
     sunk="sin")
case("expanded_parameter", lambda m, uw, i, idx: m.f(torch.cat([uw[idx],
     m.c.expand(uw[idx].shape[0],
     -1), i], 1)), f=linear(32, 8), c=parameter(1, 2), split="linear")
case("repeated_parameter", lambda m, u, i, idx: u[idx].exp() * m.c.repeat(i.shape[0], 1) + i,
     sunk="exp",
     c=parameter(1, 6))
case("class_token", lambda m, ut, it, idx: m.f(torch.cat([m.c.expand(ut[idx].shape[0], 2, 6),
     ut[idx]],
     1)).sum(1, keepdim=True) + it, f=linear(6, 6), c=parameter(1, 2, 6))
case("ones_like_item", lambda m, u, i, idx: torch.ones_like(i) * u[idx].exp(), sunk="exp")
case("eye", lambda m, us, i, idx: (torch.eye(i.shape[0], dtype=i.dtype) * us[idx].exp()) @ i,
     sunk="exp")
case("map_as_number", lambda m, u, i, idx: u[idx].exp() + idx[:, None] * i, sunk="exp")
case("map_compared", lambda m, u, i, idx: u[idx].exp() * (idx == 0)[:, None] + i, sunk="exp")
case("user_zero_alone", lambda m, u, i, idx: torch.where((idx == 0)[:, None], u[idx].exp(), i),
     sunk="exp")
case("rows_compared", lambda m, u, i, idx: u[idx].exp() * (idx[:, None] == idx).sum(1,
     keepdim=True) + i,
     sunk="exp")
case("one_user_for_all", lambda m, u, i, idx: u[:1].exp().expand(i.shape[0],
     -1) * i + u[idx].tanh(),
     sunk="tanh")
case("half_of_rows", lambda m, u, i, idx: u[idx][: i.shape[0] // 2].sum(0) * i,
     not_exportable="Constraints violated")

# Writes in place: the copy changes, the user does not.
case("add_in_place", lambda m, u, i, idx: u[idx].add_(1).exp() + i + u[idx], sunk="exp")
case("relu_in_place", lambda m, u, i, idx: (lambda x: x + F.relu(x, inplace=True))(u[idx]) * i,
     sunk="relu")
case("mul_by_item_in_place", lambda m, u, i, idx: u[idx].mul_(i).exp() + u[idx].tanh(), sunk="tanh",
     kept="mul exp")
case("masked_fill_in_place", lambda m, u, ub, i, idx: u[idx].masked_fill_(ub[idx],
     0).exp() + i + u[idx],
     sunk="masked_fill exp")


def column_write(m, u, i, idx):
    x = u[idx]
    x[:, 0] = 0.5
    return x.exp() + i + u[idx]


def row_write(m, u, i, idx):
    x = u[idx]
    x[0] = 0.5
    return x.exp() + i


def item_write(m, u, i, idx):
    x = u[idx]
    x[:, 2:4] = i[:, 2:4]
    return x.exp() + u[idx].tanh()


def write_through_view(m, ut, it, idx):
    x = ut[idx]
    flat = x.view(-1, 24)
    flat += 1
    return x.exp() + it


def write_before(m, u, i, idx):
    x = u.clone()
    y = x[idx]
    x.mul_(2)
    return y.exp() + x[idx] + i


def filled_buffer(m, u, i, idx):
    x = torch.zeros(i.shape[0], 12, dtype=i.dtype)
    x[:, :6] = u[idx].exp()
    x[:, 6:] = i
    return x.sum(1)


def write_to_input(m, u, i, idx):
    u.add_(1)
    return u[idx] + i


def loop(m, u, i, idx):
    x = i
    for _ in range(4):
        x = torch.tanh(m.f(u[idx]) + x)
    return x


def branch_on_size(m, u, i, idx):
    x = u[idx]
    return x.exp() + i if x.dim() == 2 else x


def branch_on_values(m, u, i, idx):
    return u[idx] + i if bool(u.sum() > 0) else u[idx] - i


case("column_write", column_write, sunk="exp")
case("row_write", row_write)
case("item_write", item_write, sunk="tanh", kept="exp")
case("write_through_view", write_through_view, sunk="exp")
case("write_before", write_before, sunk="exp")
case("filled_buffer", filled_buffer, sunk="exp")
case("loop", loop, f=linear(6, 6), sunk="linear", kept="tanh")
case("branch_on_size", branch_on_size, sunk="exp")

# Whole signatures.
case("nothing_to_do", lambda m, i: i.exp(), kept="exp")
case("no_broadcast", lambda m, u, i, idx: (u.exp(), i.tanh()), sunk="exp", kept="tanh")
case("map_unused", lambda m, u, i, idx: i * u.sum(0))
case("returns_input", lambda m, u, i, idx: (i, u[idx].exp()), sunk="exp")
case("returns_view_of_input", lambda m, u, i, idx: (i.t(),
     u[idx].exp()), sunk="exp")
case("returns_broadcast", lambda m, u, i, idx: (u[idx], u[idx].exp() * i), sunk="exp")
case("returns_twice", lambda m, u, i, idx: (lambda y: (y, y))(u[idx].exp() + i), sunk="exp")
case("returns_user_level", lambda m, u, i, idx: {"user": u.exp(), "item": u.exp()[idx] * i},
     sunk="exp")
case("dead_code", lambda m, u, i, idx: (u[idx].sum(0), u[idx].exp() + i)[1], sunk="exp")
case("unused_input", lambda m, u, u2, i, idx: u[idx].exp() + i, sunk="exp")
case("same_layer_often", lambda m, u, i, idx: m.f(m.f(u[idx])) + m.f(i), f=linear(6, 6),
     split="linear")
case("deep", lambda m, u, i, idx: m.f(u[idx]) + i, sunk="linear tanh", f=lambda: nn.Sequential(
     *(layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.Tanh()))))
case("wide_then_narrow", lambda m, u, i, idx: m.g(m.f(u[idx])) + i, f=linear(6, 64), g=linear(64,
     6),
     sunk="linear")
case("narrow_then_wide", lambda m, us, i, idx: (us[idx][:, None] * m.w).exp() + i, w=parameter(6),
     sunk="exp")
case("expensive_to_copy", lambda m, u, i, idx: m.f(u[idx]).sum(-1, keepdim=True) + i,
     f=linear(6, 64), sunk="linear sum")

# Rows that no item refers to: the original never reads them.
case("nan_without_items", lambda m, u_nan, i, idx: m.f(u_nan[idx]).softmax(-1) + i, f=linear(6, 6),
     sunk="linear softmax")
case("bad_ids_without_items", lambda m, bad_ids, i, idx: m.e(bad_ids[idx]).sum(1) + i,
     e=lambda: nn.Embedding(10, 6))

# To refuse.
case("squeeze_everything", lambda m, us, i, idx: us[:, None][idx].squeeze() + i.sum(1),
     refused="squeeze")
case("squeeze_batch", lambda m, u, i, idx: u[idx].squeeze(0) + i.squeeze(0), refused="squeeze")
case("dropout_training", lambda m, u, i, idx: m.drop(u[idx]) + i, drop=lambda: nn.Dropout(0.5),
     training=True, refused="training")
case("dropout_always", lambda m, u, i, idx: F.dropout(u[idx], 0.5) + i, refused="random")
case("batch_norm_training", lambda m, ut, it, idx: m.norm(ut[idx]) + it, training=True,
     norm=lambda: nn.BatchNorm1d(4), refused="training")
case("batch_norm_functional", lambda m, ut, it, idx: it + F.batch_norm(ut[idx], None, None,
     training=True),
     refused="batch_norm|training|mixes")
case("rand_like", lambda m, u, i, idx: u[idx] + torch.rand_like(i), refused="random")
case("bernoulli", lambda m, up, i, idx: torch.bernoulli((up[idx] / 2).clamp(0, 1)) + i,
     refused="random")
case("gumbel", lambda m, u, i, idx: F.gumbel_softmax(u[idx]) + i, refused="random")
case("nonzero", lambda m, u, i, idx: u[idx].nonzero()[:, 0].sum() + i, refused="data|values")
case("boolean_index", lambda m, u, i, idx: i.sum(0) + u[idx][i[:, 0] > 0].sum(0),
     refused="data|values")
case("unique", lambda m, u, iid, i, idx: iid.unique().sum() + i + u[idx], refused="data|values")
case("branch_on_values", branch_on_values, refused="data|values", not_exportable="data-dependent")
case("item_call", lambda m, u, i, idx: u[idx] * i.sum().item(), refused="data|values")
case("python_slice", lambda m, u, lengths, i, idx: u[idx][:, : int(lengths.max())].sum(1),
     refused="data|values",
     not_exportable="data-dependent")
case("write_to_input", write_to_input, refused="writes|mutat|in place")

# Features that come already broadcast, as most flat models take them.
case("compact_relu", lambda m, u, i: u.relu() + i, compact="u", sunk="relu")
case("compact_linear", lambda m, uw, i: m.f(torch.cat([uw, i], 1)), compact="uw", f=linear(30, 8),
     split="linear", limit=8)
case("compact_mlp", lambda m, u, i: m.f(u) * i, compact="u", sunk="linear relu",
     f=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)))
case("compact_embedding", lambda m, ids, i: m.e(ids).mean(1) + i, compact="ids",
     sunk="embedding mean",
     e=lambda: nn.Embedding(10, 6))
case("compact_attention", lambda m, hist, valid, q: F.scaled_dot_product_attention(q[:, None], hist,
     hist, valid[:, None])[:, 0], compact="hist valid", limit=32)
case("compact_three_levels", lambda m, uw, vw, i: m.f(torch.cat([uw, vw, i], 1)), compact="uw vw",
     f=linear(48, 8), split="linear linear@vendor", limit=8)
case("compact_together", lambda m, u, u2, i: (u * u2).exp() + i, compact="u u2", sunk="mul exp")
case("compact_user_and_vendor", lambda m, u, v, i: (u.exp() * v).tanh() + i, compact="u v",
     sunk="exp tanh@vendor")
case("compact_mixing", lambda m, u, i: i * u.mean(0) + u.exp(), compact="u", sunk="exp",
     kept="mean")
case("compact_batch_size", lambda m, u, i: u.exp() / u.shape[0] + i, compact="u", sunk="exp")
