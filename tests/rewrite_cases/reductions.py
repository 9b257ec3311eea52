"""Ops over dimensions of a row: free to run before the broadcast. The same over the batch: not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rewrite_cases.case import Cases, parameter

case = CASES = Cases("reductions")

# fmt: off
# Over the features of a row.
case("softmax", lambda m, u, i, idx: u[idx].softmax(-1) + i, sunk="softmax")
case("softmax_positive_dim", lambda m, u, i, idx: F.softmax(u[idx], dim=1) + i, sunk="softmax")
case("softmax_tokens", lambda m, ut, it, idx: ut[idx].softmax(1) + it, sunk="softmax")
case("softmax_dtype", lambda m, u, i, idx: F.softmax(u[idx], -1, dtype=torch.float64) + i,
     sunk="softmax")
case("log_softmax", lambda m, u, i, idx: u[idx].log_softmax(-1) + i, sunk="log_softmax")
case("sum_keepdim", lambda m, u, i, idx: u[idx].sum(-1, keepdim=True) + i, sunk="sum")
case("sum_dropped", lambda m, ut, i, idx: ut[idx].sum(1) + i, sunk="sum")
case("sum_two_dims", lambda m, ut, i, idx: ut[idx].sum((1, 2))[:, None] + i, sunk="sum")
case("sum_negative_dims", lambda m, ut, i, idx: ut[idx].sum((-1, -2))[:, None] + i, sunk="sum")
case("mean", lambda m, ut, i, idx: ut[idx].mean(1) * i, sunk="mean")
case("amax", lambda m, ut, i, idx: ut[idx].amax(1) + i, sunk="amax")
case("amin", lambda m, ut, i, idx: ut[idx].amin((1,)) + i, sunk="amin")
case("max_values", lambda m, ut, i, idx: ut[idx].max(1).values + i, sunk="max")
case("max_indices", lambda m, ut, i, idx: ut[idx].max(dim=1)[1] * i, sunk="max")
case("min_both", lambda m, ut, i, idx: sum(ut[idx].min(1)) + i, sunk="min")
case("argmax", lambda m, u, i, idx: u[idx].argmax(-1)[:, None] * i, sunk="argmax")
case("any_of", lambda m, u, i, idx: (u[idx] > 1).any(1)[:, None] * i, sunk="gt any")
case("all_of", lambda m, u, i, idx: (u[idx] > -1).all(-1, keepdim=True) * i, sunk="gt all")
case("prod", lambda m, u, i, idx: u[idx].prod(1, keepdim=True) + i, sunk="prod")
case("var", lambda m, u, i, idx: u[idx].var(-1, keepdim=True) + i, sunk="var")
case("std_biased", lambda m, u, i, idx: u[idx].std(-1, unbiased=False)[:, None] + i, sunk="std")
case("var_mean", lambda m, u, i, idx: sum(torch.var_mean(u[idx], 1))[:, None] + i, sunk="var_mean")
case("norm", lambda m, u, i, idx: i / u[idx].norm(dim=-1, keepdim=True), sunk="norm")
case("normalize", lambda m, u, i, idx: (F.normalize(u[idx], dim=-1) * F.normalize(i,
     dim=-1)).sum(1),
     split="norm div")
case("logsumexp", lambda m, ut, i, idx: ut[idx].logsumexp(1) + i, sunk="logsumexp")
case("cumsum", lambda m, u, i, idx: u[idx].cumsum(-1) + i, sunk="cumsum")
case("cumprod", lambda m, u, i, idx: u[idx].cumprod(1) + i, sunk="cumprod")
case("cummax", lambda m, u, i, idx: u[idx].cummax(1).values + i, sunk="cummax")
case("count_nonzero", lambda m, ub, i, idx: ub[idx].sum(1, keepdim=True) * i, sunk="sum")
case("cosine_same", lambda m, u, u2, i, idx: F.cosine_similarity(u[idx], u2[idx])[:, None] * i,
     sunk="cosine_similarity")
case("cosine_of_tokens", lambda m, ut, ut2, it, idx: F.cosine_similarity(ut[idx], ut2[idx], dim=-1)
     [..., None] * it, sunk="cosine_similarity")
case("cosine_across", lambda m, u, i, idx: F.cosine_similarity(u[idx].exp(), i, dim=-1), sunk="exp")

# Order within a row.
case("sort", lambda m, u, i, idx: u[idx].sort(-1).values + i, sunk="sort")
case("argsort", lambda m, u, i, idx: u[idx].argsort(1) * i, sunk="argsort")
case("topk", lambda m, u, i, idx: u[idx].topk(2, dim=-1).values.sum(-1, keepdim=True) + i,
     sunk="topk sum")
case("kthvalue", lambda m, u, i, idx: u[idx].kthvalue(2, -1).values[:, None] + i, sunk="kthvalue")
case("flip", lambda m, u, i, idx: u[idx].flip(-1).exp() + i, sunk="exp")
case("roll", lambda m, u, i, idx: u[idx].roll(2, -1).exp() + i, sunk="exp")
case("tril", lambda m, ut, i, idx: ut[idx].tril().sum(1) + i, sunk="tril sum")
case("diagonal", lambda m, ut, i, idx: ut[idx].diagonal(0, 1, 2).exp().sum(1, keepdim=True) + i,
     sunk="exp sum")
case("pad", lambda m, u, i, idx: F.pad(u[idx], (1, 2)).exp()[:, :6] + i, split="exp")
case("scatter_add_in_row", lambda m, u, pos, i, idx: torch.zeros_like(u[idx]).scatter_add(
     1, pos[idx], u[idx][:, :2]) + i, sunk="scatter_add")
case("gather_in_row", lambda m, u, pos, i, idx: u[idx].gather(1, pos[idx]).exp().sum(1)[:,
     None] + i,
     sunk="exp sum")
case("take_along_in_row", lambda m, u, pos, i, idx: torch.take_along_dim(u[idx], pos[idx], 1).exp()
     .sum(1, keepdim=True) + i, sunk="exp sum",
     not_exportable="Constraints violated")
case("glu", lambda m, ut, i, idx: F.glu(ut[idx], dim=1).sum(1) + i, sunk="glu sum")

# Norms and other layers over the features of a row.
case("layer_norm", lambda m, u, i, idx: m.norm(u[idx]) + i, norm=lambda: nn.LayerNorm(6),
     sunk="layer_norm")
case("layer_norm_plain", lambda m, u, i, idx: F.layer_norm(u[idx], (6,)) + i, sunk="layer_norm")
case("layer_norm_tokens", lambda m, ut, it, idx: m.norm(ut[idx]) + it, sunk="layer_norm",
     norm=lambda: nn.LayerNorm(6))
case("layer_norm_two_dims", lambda m, ut, it, idx: m.norm(ut[idx]) + it, sunk="layer_norm",
     norm=lambda: nn.LayerNorm((4, 6)))
case("rms_norm", lambda m, u, i, idx: m.norm(u[idx]) + i, norm=lambda: nn.RMSNorm(6),
     sunk="rms_norm")
case("rms_by_hand", lambda m, u, i, idx: u[idx] * (u[idx].pow(2).mean(-1, keepdim=True) + 1e-5)
     .rsqrt() * m.g + i, g=parameter(6), sunk="pow mean rsqrt", split="mul")
case("group_norm", lambda m, ut, it, idx: m.norm(ut[idx]) + it, norm=lambda: nn.GroupNorm(2, 4),
     sunk="group_norm")
case("instance_norm", lambda m, ut, it, idx: F.instance_norm(ut[idx]) + it, split="*")
case("batch_norm_eval", lambda m, u, i, idx: m.norm(u[idx]) + i, split="*",
     norm=lambda: nn.BatchNorm1d(6))
case("batch_norm_tokens", lambda m, ut, it, idx: m.norm(ut[idx]) + it, split="*",
     norm=lambda: nn.BatchNorm1d(4))
case("conv1d", lambda m, hist, q, idx: m.conv(hist[idx].transpose(1, 2)).amax(2) + q,
     conv=lambda: nn.Conv1d(8, 8, 4), sunk="conv1d amax")
case("max_pool", lambda m, uw, i, idx: F.max_pool1d(uw[idx][:, None], 4).exp()[:, 0] + i,
     sunk="exp")
case("avg_pool", lambda m, ut, i, idx: F.adaptive_avg_pool1d(ut[idx], 2).exp().sum((1, 2))[:, None]
     + i, sunk="exp sum")

# Over the batch: every item counts, once for each item below its user.
case("sum_of_rows", lambda m, u, i, idx: i * u[idx].sum(0), kept="sum")
case("sum_of_all", lambda m, u, i, idx: i * u[idx].sum(), kept="sum")
case("mean_of_rows", lambda m, u, i, idx: i - u[idx].mean(0, keepdim=True), kept="mean")
case("mean_of_all", lambda m, u, i, idx: i - u[idx].mean(), kept="mean")
case("negative_dim_is_batch", lambda m, u, i, idx: i * u[idx].sum(-2, keepdim=True), kept="sum")
case("both_dims", lambda m, u, i, idx: i * u[idx].sum((0, 1)), kept="sum")
case("max_of_rows", lambda m, u, i, idx: i + u[idx].amax(0))  # as many as it likes: max is the same
case("var_of_rows", lambda m, u, i, idx: i * u[idx].var(0, unbiased=False), kept="var")
case("norm_of_rows", lambda m, u, i, idx: i / u[idx].norm(dim=0), kept="norm")
case("norm_of_all", lambda m, u, i, idx: i / u[idx].norm(), kept="norm")
case("logsumexp_of_rows", lambda m, u, i, idx: i + u[idx].logsumexp(0), kept="logsumexp")
case("normalize_rows", lambda m, u, i, idx: i + F.normalize(u[idx], dim=0), kept="norm")
case("standardised", lambda m, u, i, idx: i + (u[idx] - u[idx].mean(0)) / (u[idx].std(
     0, unbiased=False) + 1), kept="mean std")
case("argmax_of_rows", lambda m, u, i, idx: i + u[idx].argmax(0), kept="argmax")
case("prod_of_rows", lambda m, up, i, idx: i + up[idx].prod(0), kept="prod")
case("any_of_rows", lambda m, u, i, idx: i * (u[idx] > 1).any(0))
case("after_transpose", lambda m, u, i, idx: i * u[idx].t().sum(1), kept="sum")
case("user_rows_first", lambda m, u, i, idx: (u - u.mean(0)).exp()[idx] + i, sunk="mean sub exp")
