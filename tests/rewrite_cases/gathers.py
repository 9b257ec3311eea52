"""All the ways in which models broadcast."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rewrite_cases.case import Cases, linear

case = CASES = Cases("gathers")

# fmt: off
# One map.
case("index", lambda m, u, i, idx: u[idx].exp() + i, sunk="exp")
case("index_tuple", lambda m, u, i, idx: u[idx, :].exp() + i, sunk="exp")
case("index_column", lambda m, u, i, idx: u[idx, 2].exp()[:, None] + i, sunk="exp")
case("index_columns_below", lambda m, u, i, idx: u[:, 2:6][idx].exp() + i[:, :4], sunk="exp")
case("index_ellipsis", lambda m, ut, it, idx: ut[idx, ...].exp() + it, sunk="exp")
case("index_grid", lambda m, u, i, idx: u[idx[:, None]].exp().squeeze(1) + i)
case("index_select", lambda m, u, i, idx: u.index_select(0, idx).exp() + i, sunk="exp")
case("index_select_function", lambda m, ut, it, idx: torch.index_select(ut, 0, idx).exp() + it,
     sunk="exp")
case("embedding", lambda m, u, i, idx: F.embedding(idx, u).exp() + i, sunk="exp")
case("gather", lambda m, u, i, idx: u.gather(0, idx[:, None].expand(-1, 6)).exp() + i, sunk="exp")
case("gather_tokens", lambda m, ut, it, idx: torch.gather(ut, 0, idx.view(-1, 1, 1).expand(-1, 4,
     6))
     .exp() + it, sunk="exp")
case("gather_repeated", lambda m, u, i, idx: u.gather(0, idx.unsqueeze(1).repeat(1, 6)).exp() + i,
     sunk="exp")
case("gather_transposed", lambda m, u, i, idx: u.t().gather(1, idx.expand(6, -1)).exp().t() + i,
     sunk="exp")
case("take_along", lambda m, u, i, idx: torch.take_along_dim(u, idx[:, None], 0).exp() + i,
     not_exportable="Constraints violated")
case("select_columns_transposed", lambda m, u, i, idx: u.t().index_select(1, idx).exp().t() + i,
     sunk="exp")
case("index_second", lambda m, ut, it, idx: ut.transpose(0, 1)[:, idx].exp() + it.transpose(0, 1),
     sunk="exp")
case("index_last", lambda m, u, i, idx: u.t()[..., idx].exp() + i.t(), sunk="exp")
case("long_map", lambda m, u, i, idx32: u[idx32.long()].exp() + i, sunk="exp")
case("map_int32", lambda m, u, i, idx32: u[idx32].exp() + i, sunk="exp")
case("map_int32_select", lambda m, u, i, idx32: u.index_select(0, idx32).exp() + i, sunk="exp")
case("map_int32_embedding", lambda m, u, i, idx32: F.embedding(idx32, u).exp() + i, sunk="exp")
case("map_flattened", lambda m, u, i, idx: u[idx.view(-1)].exp() + i, sunk="exp")
case("map_from_column", lambda m, u, i, idx: u[idx.unsqueeze(1).squeeze(1)].exp() + i, sunk="exp")
case("map_unsorted", lambda m, u, i, any_idx: u[any_idx].exp() + i, sunk="exp")
case("map_unsorted_linear", lambda m, uw, i, any_idx: m.f(torch.cat([uw[any_idx], i], 1)),
     f=linear(30, 8), split="linear", limit=8)
case("map_unsorted_attention", lambda m, hist, valid, qs, any_idx: F.scaled_dot_product_attention(
     qs, hist[any_idx], hist[any_idx], valid[any_idx][:, None]), limit=48)

# repeat_interleave by counts.
case("repeat_counts", lambda m, u, i, counts: u.repeat_interleave(counts, 0, output_size=i.shape[0])
     .exp() + i, sunk="exp")
case("repeat_counts_function", lambda m, ut, it, counts: torch.repeat_interleave(ut, counts, dim=0,
     output_size=it.size(0)).softmax(-1) + it, sunk="softmax")
case("repeat_counts_linear", lambda m, uw, i, counts: m.f(torch.cat([uw.repeat_interleave(counts, 0,
     output_size=i.shape[0]), i], 1)), f=linear(30, 8), split="linear", limit=8)
case("repeat_counts_measured", lambda m, u, i, counts: u.repeat_interleave(counts, 0).exp() + i,
     sunk="exp")
case("repeat_row_numbers", lambda m, u, i, counts: u[torch.arange(u.shape[0]).repeat_interleave(
     counts, output_size=i.shape[0])].exp() + i, sunk="exp")
case("repeat_numbers_of_counts", lambda m, u, i, counts: u[torch.repeat_interleave(
     counts, output_size=i.shape[0])].exp() + i, sunk="exp")
case("repeat_vendor_counts", lambda m, v, i, vcounts: v.repeat_interleave(vcounts, 0,
     output_size=i.shape[0]).exp() + i, sunk="exp@vendor")
case("repeat_twice", lambda m, u, v, i, ucounts, vcounts: (u.repeat_interleave(ucounts, 0,
     output_size=v.shape[0]).exp() + v).repeat_interleave(vcounts, 0, output_size=i.shape[0]).tanh()
     + i, sunk="exp tanh@vendor")
case("repeat_then_flip", lambda m, u, i, counts: u.repeat_interleave(counts, 0,
     output_size=i.shape[0])
     .flip(0).exp() + i)
case("repeat_then_view", lambda m, ut, it, counts: ut.repeat_interleave(counts, 0,
     output_size=it.shape[0]).view(-1, 6).softmax(1).view(-1, 4, 6) + it, sunk="softmax")
case("counts_and_map", lambda m, u, u2, i, counts, idx: u.repeat_interleave(counts, 0,
     output_size=i.shape[0]).exp() * u2[idx].tanh() + i, sunk="exp tanh")
case("repeat_inside_user", lambda m, u, i, idx: u.repeat_interleave(2, 0).view(-1, 2,
     6).sum(1).exp()[
     idx] + i, sunk="exp")

# Several maps and chains of them.
case("chain", lambda m, u, v, i, vu, iv: (u[vu].exp() + v)[iv].tanh() + i, sunk="exp tanh@vendor")
case("chain_without_vendor", lambda m, u, i, vu, iv: u[vu][iv].exp() + i, sunk="exp")
case("chain_of_maps", lambda m, u, i, vu, iv: u[vu[iv]].exp() + i, sunk="exp")
case("chain_of_maps_shared", lambda m, u, u2, i, vu, iv: u[vu[iv]].exp() * u2[vu][iv].tanh() + i,
     sunk="exp tanh")
case("chain_select", lambda m, u, v, i, vu, iv: (u.index_select(0, vu) * v).index_select(0,
     iv).exp()
     + i, sunk="mul@vendor exp@vendor")
case("chain_embedding", lambda m, u, i, vu, iv: F.embedding(F.embedding(iv, vu[:, None])[:, 0], u)
     .exp() + i)
case("chain_to_vendor_late", lambda m, u, v, i, vu, iv: (u[vu[iv]] * v[iv]).exp() + i,
     sunk="exp@vendor")
case("chain_and_direct", lambda m, u, u2, i, idx, vu, iv: u[idx].exp() * u2[vu][iv].tanh() + i,
     sunk="exp tanh")
case("chain_and_direct_together", lambda m, u, u2, i, idx, vu, iv: (u[idx] + u2[vu[iv]]).exp() + i)
case("direct_with_vendor", lambda m, u, v, i, idx, iv: (u[idx].tanh() + v[iv].tanh()).exp() + i,
     split="tanh tanh@vendor")
case("chain_mixed_forms", lambda m, u, v, i, ucounts, iv: (u.repeat_interleave(ucounts, 0,
     output_size=v.shape[0]) + v)[iv].exp() + i, sunk="exp@vendor")
case("two_equal_maps", lambda m, u, u2, i, idx, idx2: u[idx].exp() + u2[idx2].tanh() + i,
     sunk="exp tanh")
case("two_equal_maps_together", lambda m, u, u2, i, idx, idx2: (u[idx] * u2[idx2]).exp() + i)
case("two_orders", lambda m, u, i, idx, any_idx: u[idx].exp() + u[any_idx].exp() * i,
     disagrees="any_idx.*agree")
case("two_orders_together", lambda m, u, u2, i, idx, any_idx: (u[idx] * u2[any_idx]).exp() + i,
     disagrees="any_idx.*agree")
case("two_orders_one_declared", lambda m, u, i, idx, other: u[idx].exp() + u[other].tanh() * i,
     sunk="exp")
case("same_twice", lambda m, u, i, idx: u[idx].exp() * u[idx].exp() + i, sunk="exp", split="mul")
case("gathered_once", lambda m, u, i, idx: (lambda x: x.exp() * x.tanh() + i)(u[idx]),
     sunk="exp tanh", split="mul")
case("all_at_once", lambda m, u, up, i, idx: torch.cat([u, up], 1)[idx].tanh().view(-1, 2,
     6).sum(1) + i,
     sunk="tanh sum")
case("map_in_between", lambda m, u, i, idx: torch.stack([u, u.exp()], 1)[idx].sum(1) * i,
     sunk="exp sum")
