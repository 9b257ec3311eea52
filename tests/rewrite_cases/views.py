"""Views of broadcast values: the batch moves, merges with other dimensions and comes back."""

from __future__ import annotations

import torch
from torch import nn

from rewrite_cases.case import Cases, linear

case = CASES = Cases("views")

# fmt: off
# Dimensions come, go and change places; what follows still runs for users.
case("unsqueeze", lambda m, u, it, idx: torch.exp(u[idx].unsqueeze(1)) + it, sunk="exp")
case("unsqueeze_last", lambda m, us, i, idx: torch.exp(us[idx].unsqueeze(-1)) + i, sunk="exp")
case("unsqueeze_front", lambda m, u, i, idx: (torch.exp(u[idx].unsqueeze(0)) + i)[0], sunk="exp")
case("none_front", lambda m, u, i, idx: (u[idx][None].softmax(-1) + i).squeeze(0), sunk="softmax")
case("none_everywhere", lambda m, u, it, idx: u[idx][:, None, :, None].exp()[..., 0] + it,
     sunk="exp")
case("squeeze_dim", lambda m, us, i, idx: us[:, None][idx].exp().squeeze(1)[:, None] + i,
     sunk="exp")
case("squeeze_negative", lambda m, u, i, idx: u[idx][..., None].squeeze(-1).exp() + i, sunk="exp")
case("squeeze_wide", lambda m, u, i, idx: u[idx].squeeze(1).exp() + i, sunk="exp")
case("squeeze_dims", lambda m, u, i, idx: u[idx][:, None, :, None].squeeze((1, 3)).exp() + i,
     sunk="exp")
case("transpose", lambda m, ut, it, idx: ut[idx].transpose(1, 2).softmax(-1) + it.mT,
     sunk="softmax")
case("transpose_batch", lambda m, ut, it, idx: ut[idx].transpose(0, 1).softmax(-1).transpose(0, 1)
     + it, sunk="softmax")
case("t", lambda m, u, i, idx: u[idx].t().softmax(0).t() + i, sunk="softmax")
case("capital_t", lambda m, u, i, idx: u[idx].T.exp() * i.T, sunk="exp")
case("permute", lambda m, ut, it, idx: ut[idx].permute(0, 2, 1).cumsum(1) + it.permute(0, 2, 1),
     sunk="cumsum")
case("permute_batch_last", lambda m, ut, it, idx: (ut[idx].permute(1, 2, 0).softmax(0)
     + it.permute(1, 2, 0)).sum(1).t(), sunk="softmax")
case("movedim", lambda m, ut, it, idx: ut[idx].movedim(0, -1).softmax(1).movedim(-1, 0) + it,
     sunk="softmax")
case("swapaxes", lambda m, ut, it, idx: ut[idx].swapaxes(0, 2).exp().swapaxes(0, 2) + it,
     sunk="exp")

# Reshapes beside the batch.
case("view_split", lambda m, uw, it, idx: uw[idx].view(-1, 4, 6).softmax(-1) + it, sunk="softmax")
case("view_rows", lambda m, uw, it, idx: uw[idx].view(it.shape[0], 4, 6).softmax(1) + it,
     sunk="softmax")
case("view_own_rows", lambda m, uw, it, idx: uw[idx].view(uw[idx].size(0), 4, -1).softmax(1) + it,
     sunk="softmax")
case("reshape_flat", lambda m, ut, it, idx: ut[idx].reshape(-1, 24).softmax(-1) + it.flatten(1),
     sunk="softmax")
case("flatten_rest", lambda m, ut, it, idx: ut[idx].flatten(1).cumsum(1) + it.flatten(1),
     sunk="cumsum")
case("unflatten", lambda m, uw, it, idx: uw[idx].unflatten(1, (4, 6)).softmax(1) + it,
     sunk="softmax")
case("transposed_flat", lambda m, ut, it, idx: ut[idx].transpose(1, 2).reshape(-1, 24).cumsum(1)
     + it.flatten(1), sunk="cumsum")
case("user_rows_view", lambda m, uw, i, idx: uw.view(uw.shape[0], 4, 6)[idx].softmax(1).sum(1) + i,
     sunk="softmax sum")
case("channels_shuffled", lambda m, uw, i, idx: uw[idx].view(-1, 2, 2, 6).transpose(1, 2)
     .reshape(-1, 24).cumsum(1)[:, 6:12] + i, sunk="cumsum")

# The batch merges with other dimensions.
case("flatten_tokens", lambda m, ut, it, idx: m.f(ut[idx].flatten(0, 1)).unflatten(0, (-1, 4)) + it,
     f=linear(6, 6), sunk="linear")
case("merge_and_split", lambda m, ut, it, idx: ut[idx].view(-1, 6).softmax(-1).view(-1, 4, 6) + it,
     sunk="softmax")
case("merge_by_size", lambda m, ut, it, idx: ut[idx].reshape(it.shape[0] * 4, 6).softmax(-1)
     .reshape(it.shape[0], 4, 6) + it, sunk="softmax")
case("merge_heads", lambda m, hist, q, idx: hist[idx].view(-1, 7, 2, 4).transpose(1, 2)
     .reshape(-1, 7, 4).softmax(-1).view(-1, 2, 7, 4).transpose(1, 2).reshape(-1, 7, 8).sum(1) + q,
     sunk="softmax")
case("merge_across", lambda m, ut, it, idx: (ut[idx].flatten(0, 1).exp() * it.flatten(0, 1))
     .view(-1, 24), sunk="exp", kept="mul")
case("merge_all", lambda m, u, i, idx: (u[idx].reshape(-1).exp() + i.reshape(-1)).view(-1, 6),
     sunk="exp")
case("batch_inside", lambda m, ut, it, idx: ut[idx].transpose(0, 1).reshape(-1, 6).exp()
     .view(4, -1, 6).transpose(0, 1) + it)
case("sum_over_merged", lambda m, ut, i, idx: i * ut[idx].flatten(0, 1).sum(0), kept="sum")
case("softmax_over_merged", lambda m, ut, it, idx: ut[idx].flatten(0, 1).softmax(0).view(-1, 4, 6)
     + it, kept="softmax")
case("regrouped", lambda m, ut, it, idx: ut[idx].reshape(4, -1, 6).softmax(0).reshape(-1, 4,
     6) + it,
     kept="softmax",
     not_exportable="Constraints violated")
case("regrouped_sum", lambda m, ut, i, idx: ut[idx].reshape(2, -1, 2, 6).sum(0).flatten(1)
     .sum(1)[:, None] * i.sum(), kept="sum",
     not_exportable="Constraints violated")

# Parts.
case("columns", lambda m, u, i, idx: u[idx][:, 1:5].softmax(-1) + i[:, :4], sunk="softmax")
case("every_second", lambda m, u8, i8, idx: u8[idx][:, ::2].cumsum(1) + i8[:, 1::2], sunk="cumsum")
case("one_token", lambda m, ut, i, idx: ut[idx][:, 2].softmax(-1) + i, sunk="softmax")
case("last_token", lambda m, ut, i, idx: ut[idx][:, -1].softmax(-1) + i, sunk="softmax")
case("one_number", lambda m, ut, i, idx: ut[idx][:, 2, 3].exp()[:, None] + i, sunk="exp")
case("ellipsis", lambda m, ut, it, idx: ut[idx][..., 1:2].exp() + it, sunk="exp")
case("select_batch_moves", lambda m, ut, i, idx: ut[idx].unsqueeze(2)[:, 1, :, 2].exp() + i,
     sunk="exp")
case("two_lists", lambda m, ut, i, idx: ut[idx][:, [0, 1, 3, 0], [5, 2, 0, 0]].exp() + i[:, :4],
     sunk="exp")
case("lists_apart", lambda m, ut, it, idx: ut[idx][:, None][:, [0, 0], :, [1, 2]].exp()
     .sum((0, 2))[:, None] * it[:, 0])
case("column_list", lambda m, u, i, idx: u[idx][:, [4, 0, 0, 1]].softmax(-1) + i[:, :4],
     sunk="softmax")
case("index_select_columns", lambda m, u, i, idx: u[idx].index_select(1, m.at).softmax(-1)
     + i[:, :4], at=lambda: torch.tensor([3, 1, 1, 0]), sunk="softmax")
case("narrow", lambda m, u, i, idx: u[idx].narrow(1, 2, 4).softmax(-1) + i[:, :4], sunk="softmax")
case("select", lambda m, ut, i, idx: ut[idx].select(1, 3).exp() + i, sunk="exp")
case("chunk", lambda m, uw, i, idx: (lambda a, b: (a * b.sigmoid())[:, :6] + i)(
     *uw[idx].chunk(2, -1)), split="sigmoid mul")
case("split", lambda m, uw, i, idx: sum(uw[idx].split(6, dim=1)) * i, split="add")
case("split_sizes", lambda m, uw, i, idx: (lambda a, b, c: a.exp() * b + c[:, :6] + i)(
     *uw[idx].split([6, 6, 12], 1)), sunk="exp")
case("unbind", lambda m, ut, i, idx: (lambda a, b, c, d: (a * b - c * d).exp() + i)(
     *ut[idx].unbind(1)), split="mul", sunk="exp")
case("hsplit", lambda m, u8, i8, idx: u8[idx].hsplit(2)[1].cumsum(1) + i8[:, :4], sunk="cumsum")
case("unfold", lambda m, u, i, idx: u[idx].unfold(1, 4, 2).amax(-1) + i[:, :2], sunk="amax")
case("three_chunks", lambda m, ut, it, idx: (lambda a, b, c: (a @ b.mT @ c) + it[:, :4, :2])(
     *m.f(ut[idx]).chunk(3, -1)), f=linear(6, 6), sunk="linear matmul")

# Expansions.
case("expand", lambda m, u, it, idx: u[idx][:, None].expand(-1, 4, -1).exp() + it, sunk="exp")
case("expand_as", lambda m, u, it, idx: u[idx].unsqueeze(1).expand_as(it).exp() * it)
case("repeat_columns", lambda m, u, i, idx: u[idx].repeat(1, 2).cumsum(1) + i.repeat(1, 2),
     sunk="cumsum")
case("tile", lambda m, us, i, idx: us[idx][:, None].tile((1, 6)).cumsum(1) + i, sunk="cumsum")
case("repeat_interleave_columns", lambda m, u, i, idx: u[idx].repeat_interleave(2, dim=1).cumsum(1)
     + i.repeat(1, 2), sunk="cumsum")
case("broadcast_to", lambda m, u, it, idx: torch.broadcast_to(u[idx][:, None], it.shape).exp() * it)
case("view_and_expand", lambda m, u, it, idx: u[idx].view(-1, 1, 6).expand(it.shape[0], 4, 6)
     .softmax(-1) * it, split="softmax")
case("folded_mean", lambda m, ut, i, idx: m.act(ut[idx].reshape(-1, 2, 2, 6).mean((1, 2))) + i,
     act=nn.SiLU, sunk="mean silu")
