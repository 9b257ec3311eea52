"""Ops in which rows meet: moved before the broadcast, they would give something else."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rewrite_cases.case import Cases

case = CASES = Cases("mixing")

# fmt: off
# Rows with rows.
case("gram_of_rows", lambda m, u, i, idx: (u[idx] @ u[idx].t()).sum(1) * i[:, 0], kept="matmul")
case("gram_across", lambda m, u, i, idx: (u[idx].exp() @ i.T).softmax(1).diagonal(), sunk="exp",
     kept="matmul softmax")
case("feature_gram", lambda m, u, i, idx: i @ (u[idx].t() @ u[idx]), kept="matmul")
case("with_its_transpose", lambda m, us, i, idx: (us[idx][:, None] + us[idx][None]).exp().sum(1)
     + i.sum(1), kept="add exp")
case("outer", lambda m, us, i, idx: torch.outer(us[idx], i[:, 0]).sum(0), kept="sum")
case("cdist", lambda m, u, i, idx: torch.cdist(u[idx], i).amin(1), kept="amin",
     not_exportable="Constraints violated")
case("pairwise_of_rows", lambda m, u, i, idx: (u[idx][:, None] * i[None]).sum(-1).logsumexp(1),
     kept="mul sum logsumexp")
case("in_batch_softmax", lambda m, u, i, idx: (u[idx] * i).sum(1).log_softmax(0),
     kept="log_softmax")
case("covariance", lambda m, u, i, idx: i @ torch.cov(u[idx].t(), correction=0),
     not_exportable="aten.equal")
case("dot_of_columns", lambda m, us, i, idx: torch.dot(us[idx], i[:, 0]) + i, kept="dot")

# Along the batch.
case("softmax", lambda m, u, i, idx: u[idx].softmax(0) + i, kept="softmax")
case("log_softmax", lambda m, u, i, idx: u[idx].log_softmax(dim=-2) + i, kept="log_softmax")
case("cumsum", lambda m, u, i, idx: u[idx].cumsum(0) + i, kept="cumsum")
case("cumprod", lambda m, up, i, idx: up[idx].cumprod(0) + i, kept="cumprod")
case("sort", lambda m, u, i, idx: u[idx].sort(0).values + i, kept="sort")
case("argsort", lambda m, us, i, idx: i[us[idx].argsort(stable=True)], kept="argsort")
case("topk", lambda m, u, i, idx: u[idx].topk(1, 0).values + i, kept="topk")
case("flip", lambda m, u, i, idx: u[idx].flip(0) * i)
case("roll", lambda m, u, i, idx: u[idx].roll(1, 0) * i)
case("roll_flat", lambda m, u, i, idx: u[idx].roll(1) * i, kept="roll")
case("reversed_and_back", lambda m, u, i, idx: u[idx].flip(0).exp().flip(0) + i)
case("layer_norm_of_batch", lambda m, u, i, idx: i + F.layer_norm(u[idx].t(), u[idx].shape[:1]).t(),
     kept="layer_norm")
case("norm_after_transpose", lambda m, u, i, idx: u[idx].t().norm(dim=1) * i, kept="norm")
case("cosine_of_columns", lambda m, u, i, idx: i * F.cosine_similarity(u[idx], i, dim=0),
     kept="cosine_similarity")
case("normalised_loss", lambda m, u, i, idx: F.mse_loss(u[idx], i), kept="mse_loss")
case("differences", lambda m, u, i, idx: i + F.pad(u[idx].diff(dim=0), (0, 0, 1, 0)),
     not_exportable="Constraints violated")
case("pad_rows", lambda m, u, i, idx: F.pad(u[idx], (0, 0, 1, 0))[:-1] + i)
case("linear_by_rows", lambda m, u, i, idx: F.linear(i, u[idx]).softmax(1).sum(0)[:, None] + i,
     kept="linear")
case("diagonal_of_rows", lambda m, u, i, idx: i * u[idx].diagonal().sum())
case("embedding_of_rows", lambda m, u, i, idx, perm: F.embedding(perm, u[idx]).exp() * i)
case("tiled_rows", lambda m, u, i, idx: u[idx].tile(2, 1)[:i.shape[0]].exp() * i)
case("repeated_rows", lambda m, u, i, idx: u[idx].repeat(2, 1)[i.shape[0]:].exp() * i)
case("tril_of_rows", lambda m, u, i, idx: u[idx].tril() + i, kept="tril")
case("gather_over_rows", lambda m, u, i, idx: u[idx].gather(0, i.argsort(0)) * i)
case("sum_to_scalar", lambda m, u, i, idx: (u[idx] * i).sum(), kept="mul sum")
case("mean_of_squares", lambda m, u, i, idx: i / u[idx].pow(2).mean().sqrt(), split="*",
     kept="mean")

# Other rows.
case("permuted", lambda m, u, i, idx, perm: u[idx][perm] * u[idx] + i, kept="mul")
case("permuted_exp", lambda m, u, i, idx, perm: u[idx][perm].exp() * i)
case("permuted_with_itself", lambda m, u, i, idx, perm: (u[idx].exp()[perm] - u[idx]).relu() + i,
     kept="sub relu")
case("items_permuted", lambda m, u, i, idx, perm: i[perm] * u[idx].exp(), sunk="exp")
case("other_user", lambda m, u, i, idx, other: (u[idx] - u[other]).exp() + i, kept="sub exp")
case("only_other_user", lambda m, u, i, idx, other: u[other].exp() + u[idx].tanh() + i)
case("friend", lambda m, u, i, idx, friend: (u + u[friend].tanh())[idx].exp() + i,
     sunk="tanh exp")
case("friend_below", lambda m, u, i, idx, friend: (u[idx] + u[friend[idx]]).exp() + i, sunk="exp")
case("first_row", lambda m, u, i, idx: u[idx][0].exp() + i)
case("last_row", lambda m, u, i, idx: u[idx][-1].exp() * i)
case("first_row_kept", lambda m, u, i, idx: u[idx][:1].exp() * i)
case("neighbour_user", lambda m, u, i, idx: u[(idx + 1) % u.shape[0]].exp() * i)
case("user_from_the_end", lambda m, u, i, idx: u[idx - u.shape[0]].exp() * i)
case("users_reversed", lambda m, u, i, idx: u.flip(0)[idx].exp() * i, sunk="exp")
case("users_summed", lambda m, u, i, idx: (u * u.sum(0)).exp()[idx] + i, sunk="mul exp")
case("users_cumsum", lambda m, u, i, idx: u.cumsum(0).exp()[idx] + i, sunk="cumsum exp")
case("users_with_users", lambda m, u, i, idx: ((u @ u.t()).softmax(1) @ u)[idx].exp() + i,
     sunk="matmul softmax exp")

# Back to users, and down again.
case("sum_per_user", lambda m, u, i, idx: u.index_add(0, idx, i)[idx].exp() + i,
     sunk="exp", kept="index_add")
case("scatter_per_user", lambda m, u, i, idx: (u + torch.zeros_like(u).scatter_add(
     0, idx[:, None].expand(-1, 6), i))[idx].exp() + i, sunk="exp", kept="scatter_add")
case("largest_per_user", lambda m, u, i, idx: (u - torch.zeros_like(u).scatter_reduce(
     0, idx[:, None].expand(-1, 6), i, "amax"))[idx] * i, kept="scatter_reduce")
case("broadcast_and_back", lambda m, u, i, idx: torch.zeros_like(u).index_add(0, idx, u[idx].exp()
     * i), sunk="exp", kept="mul index_add")
case("scatter_on_items", lambda m, u, i, idx, perm: torch.zeros_like(i).index_add(0, perm, u[idx]
     .exp()) + i, kept="index_add")
