"""Values of several levels side by side, and what usually follows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rewrite_cases.case import Cases, linear, parameter

case = CASES = Cases("concatenations")


def upper(x):
    """The pairs above the diagonal of [B, N, N], as DLRM takes them."""
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1], 1)
    return x[:, rows, columns]


def second_order(x):
    """Half of the square of the sum less the sum of the squares, over dimension 1."""
    return 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1))


# fmt: off
# A linear map of a concatenation: each level's columns at that level. The user part is the widest.
case("linear", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], -1)), f=linear(30, 8),
     split="linear", limit=8)
case("linear_item_first", lambda m, uw, i, idx: m.f(torch.cat([i, uw[idx]], 1)), f=linear(30, 8),
     split="linear", limit=8)
case("linear_no_bias", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], 1)),
     f=linear(30, 8, False), split="linear", limit=8)
case("linear_user_twice", lambda m, uw, u8, i, idx: m.f(torch.cat([uw[idx], i, u8[idx]], 1)),
     f=linear(38, 8), split="linear", limit=8)
case("linear_same_twice", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], uw[idx], i], 1)),
     f=linear(54, 8), split="linear", limit=8)
case("linear_three_levels", lambda m, uw, vw, i, idx, iv: m.f(torch.cat([uw[idx], vw[iv], i], 1)),
     f=linear(48, 8), split="linear linear@vendor", limit=8)
case("linear_by_chain", lambda m, uw, vw, i, vu, iv: m.f(torch.cat([uw[vu[iv]], vw[iv], i], 1)),
     f=linear(48, 8), split="linear linear@vendor", limit=8)
case("linear_vendor_first", lambda m, uw, vw, i, vu, iv: m.f(torch.cat([torch.cat(
     [uw[vu], vw], 1)[iv], i], 1)), f=linear(48, 8), split="linear linear@vendor", limit=8)
case("linear_one_level", lambda m, u, u2, i, idx: m.f(torch.cat([u[idx], u2[idx]], 1)) + i,
     f=linear(12, 6), sunk="cat linear")
case("linear_after_relu", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], 1).relu()),
     f=linear(30, 8), split="relu linear")
case("linear_of_towers", lambda m, uw, i, idx: m.f(torch.cat([m.g(uw[idx]).relu(), m.h(i).relu()],
     1)),
     f=linear(40, 8), g=linear(24, 32), h=linear(6, 8), split="linear relu", limit=8)
case("linear_of_product", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i, uw[idx][:, :6] * i], 1)),
     f=linear(36, 8), split="linear")
case("linear_nested", lambda m, uw, u8, i, idx: m.f(torch.cat([torch.cat([uw[idx], i], 1), u8[idx]],
     1)), f=linear(38, 8), split="linear", limit=8)
case("linear_with_constant", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i, m.c.expand(
     i.shape[0], -1)], 1)), f=linear(32, 8), c=parameter(1, 2), split="linear")
case("linear_columns", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], 1)[:, 4:28]),
     f=linear(24, 8), split="linear")
case("linear_unsqueezed", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], 1)[:, None])[:, 0],
     f=linear(30, 8), split="linear")
case("mlp", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], 1)), split="linear", kept="relu",
     f=lambda: nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 4)))
case("two_heads", lambda m, uw, i, idx: (lambda x: m.f(x) * m.g(x).sigmoid())(torch.cat(
     [uw[idx], i], 1)), f=linear(30, 4), g=linear(30, 4), split="linear")
case("matmul", lambda m, uw, i, idx: torch.cat([uw[idx], i], 1) @ m.w, w=parameter(30, 8),
     split="matmul", limit=8)
case("addmm", lambda m, uw, i, idx: torch.addmm(m.b, torch.cat([uw[idx], i], 1), m.w),
     b=parameter(8), w=parameter(30, 8), split="addmm", limit=8)
case("einsum", lambda m, uw, i, idx: torch.einsum("bk,mk->bm", torch.cat([uw[idx], i], 1), m.w),
     w=parameter(8, 30), split="einsum", limit=8)
case("dropout_between", lambda m, uw, i, idx: m.f(F.dropout(torch.cat([uw[idx], i], 1), 0.3,
     m.training)), f=linear(30, 8), split="linear", limit=8)
case("scaled_between", lambda m, uw, i, idx: m.f(torch.cat([uw[idx], i], 1) * m.a), f=linear(30, 8),
     a=parameter(30), split="mul linear")
case("batch_norm_between", lambda m, uw, i, idx: m.f(m.norm(torch.cat([uw[idx], i], 1))),
     f=linear(30, 8), norm=lambda: nn.BatchNorm1d(30), split="linear")

# Other spellings of cat, and what splits along with it.
case("concat", lambda m, uw, i, idx: m.f(torch.concat((uw[idx], i), dim=1)), f=linear(30, 8),
     split="linear", limit=8)
case("hstack", lambda m, uw, i, idx: m.f(torch.hstack((uw[idx], i))), f=linear(30, 8),
     split="linear", limit=8)
case("column_stack", lambda m, us, u, i, idx: m.f(torch.column_stack((us[idx], u[idx], i))),
     f=linear(13, 8), split="linear")
case("relu", lambda m, u, i, idx: torch.cat([u[idx], i], 1).relu(), split="relu")
case("part_back", lambda m, u, i, idx: torch.cat([u[idx], i], 1)[:, :6].exp() + i, sunk="exp")
case("split_back", lambda m, u, i, idx: (lambda a, b: a.exp() + b)(*torch.cat([u[idx], i], 1)
     .chunk(2, 1)), sunk="exp")
case("softmax", lambda m, u, i, idx: torch.cat([u[idx], i], 1).softmax(1))
case("sum", lambda m, u, i, idx: torch.cat([u[idx], i], 1).sum(1), split="*")
case("mean", lambda m, u, i, idx: torch.cat([u[idx], i], 1).mean(-1, keepdim=True) * i)
case("max", lambda m, u, i, idx: torch.cat([u[idx], i], 1).amax(1))
case("mask_parts", lambda m, u, ub, i, ib, idx: torch.cat([u[idx], i], 1).masked_fill(
     torch.cat([ub[idx], ib], 1), 0.0).sum(1))
case("gate_all", lambda m, uw, i, idx: (lambda x: x * m.f(x).sigmoid())(torch.cat([uw[idx], i], 1)),
     f=linear(30, 30), split="linear")
case("reshaped", lambda m, uw, it, idx: m.f(torch.cat([uw[idx], it.flatten(1)], 1).view(-1, 8, 6)),
     f=linear(6, 8))

# Norms over a concatenation: sums of each level's squares meet, not the columns.
case("layer_norm", lambda m, uw, i, idx: m.norm(torch.cat([uw[idx], i], 1)),
     norm=lambda: nn.LayerNorm(30))
case("layer_norm_linear", lambda m, uw, i, idx: m.f(m.norm(torch.cat([uw[idx], i], 1))),
     norm=lambda: nn.LayerNorm(30), f=linear(30, 8), split="*")
case("layer_norm_three_levels", lambda m, uw, vw, i, idx, iv: m.f(m.norm(torch.cat(
     [uw[idx], vw[iv], i], 1))), norm=lambda: nn.LayerNorm(48), f=linear(48, 8), split="*")
case("rms_norm", lambda m, uw, i, idx: m.f(m.norm(torch.cat([uw[idx], i], 1))),
     norm=lambda: nn.RMSNorm(30), f=linear(30, 8), split="*")
case("normalize", lambda m, uw, i, idx: m.f(F.normalize(torch.cat([uw[idx], i], 1), dim=1)),
     f=linear(30, 8))

# Tokens of several levels.
case("tokens_linear", lambda m, ut, it, idx: m.f(torch.cat([ut[idx], it], 1)), f=linear(6, 8),
     split="linear")
case("tokens_wider", lambda m, ut, it, idx: m.f(torch.cat([ut[idx], it], -1)), f=linear(12, 6),
     split="linear")
case("tokens_layer_norm", lambda m, ut, it, idx: m.norm(torch.cat([ut[idx], it], 1)),
     norm=lambda: nn.LayerNorm(6), split="layer_norm")
case("tokens_over", lambda m, ut, it, idx: torch.einsum("bnd,mn->bmd", torch.cat([ut[idx], it], 1),
     m.w), w=parameter(2, 8), split="einsum", limit=24)
case("tokens_compressed", lambda m, ut, it, idx: m.f(torch.cat([ut[idx], it], 1).mT), f=linear(8,
     2),
     split="linear", limit=24)
case("tokens_sum", lambda m, ut, it, idx: torch.cat([ut[idx], it], 1).sum(1), split="sum", limit=24)
case("tokens_flat", lambda m, ut, it, idx: m.f(torch.cat([ut[idx], it], 1).flatten(1)),
     f=linear(48, 8), split="linear")
case("tokens_three_levels", lambda m, ut, vt, it, idx, iv: m.f(torch.cat([ut[idx], vt[iv], it], 1)
     .mT), f=linear(12, 2), split="linear linear@vendor", limit=24)
case("stack", lambda m, u, i, idx: m.f(torch.stack([u[idx], u[idx].exp(), i, i * i], 1)),
     f=linear(6, 8),
     sunk="exp")
case("stack_last", lambda m, u, i, idx: torch.stack([u[idx].exp(), i], -1).prod(-1), sunk="exp")

# Interactions.
case("dot_interaction", lambda m, ut, it, idx: (lambda x: upper(torch.bmm(x, x.transpose(1, 2))))(
     torch.cat([ut[idx], it], 1)), split="bmm")
case("dot_interaction_stacked", lambda m, u, u2, i, idx: (lambda x: upper(x @ x.mT))(torch.stack(
     [u[idx], u2[idx], i, i.exp()], 1)))
case("dot_three_levels", lambda m, ut, vt, it, idx, iv: (lambda x: upper(torch.bmm(x, x.mT)))(
     torch.cat([ut[idx], vt[iv], it], 1)), split="bmm")
case("dlrm_top", lambda m, ut, it, idx: m.f(torch.cat([it[:, 0], upper((lambda x: x @ x.mT)(
     torch.cat([ut[idx], it], 1)))], 1)), f=linear(34, 8), split="matmul")
case("fm", lambda m, u, u2, i, idx: second_order(torch.stack([u[idx], u2[idx], i, i.exp()],
     1)).sum(1),
     split="*")
case("fm_tokens", lambda m, ut, it, idx: second_order(torch.cat([ut[idx], it], 1)), split="pow sum")
case("fm_three_levels", lambda m, ut, vt, it, idx, iv: second_order(torch.cat(
     [ut[idx], vt[iv], it], 1)), split="pow sum pow@vendor")
case("cross_layer", lambda m, uw, i, idx: (lambda x: x * m.f(x) + x)(torch.cat([uw[idx], i], 1)),
     f=linear(30, 30), split="linear")
case("cross_two_layers", lambda m, uw, i, idx: (lambda x, y: x * m.g(y) + y)(*(lambda x: (x,
     x * m.f(
     x) + x))(torch.cat([uw[idx], i], 1))), f=linear(30, 30), g=linear(30, 30), split="linear")
case("cross_vector", lambda m, uw, i, idx: (lambda x: x * m.f(x) + m.b + x)(torch.cat([uw[idx], i],
     1)), f=linear(30, 1, False), b=parameter(30), split="linear")
case("cross_low_rank", lambda m, uw, i, idx: (lambda x: x * m.g(m.f(x)) + x)(torch.cat([uw[idx], i],
     1)), f=linear(30, 4), g=linear(4, 30), split="linear")
case("mixer", lambda m, ut, it, idx: (lambda x: x + m.f(x.mT).mT)(torch.cat([ut[idx], it], 1)),
     f=linear(8, 8), split="linear")

# Along the batch: rows meet.
case("along_batch", lambda m, u, i, idx: torch.cat([u[idx], i], 0).softmax(0).sum(1),
     kept="softmax")
case("along_batch_default", lambda m, u, i, idx: torch.cat([u[idx], i]).exp())
case("vstack", lambda m, u, i, idx: torch.vstack([u[idx], i]).cumsum(0), kept="cumsum")
case("stack_front", lambda m, u, i, idx: torch.stack([u[idx].exp(), i]).sum(0), sunk="exp")
