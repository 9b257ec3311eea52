"""Products in all their spellings: of rows with weights, with each other, across levels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rewrite_cases.case import Cases, linear, parameter

case = CASES = Cases("matmuls")

# fmt: off
# Rows times weights.
case("linear", lambda m, u, i, idx: m.f(u[idx]) + i, f=linear(6, 6), sunk="linear")
case("linear_no_bias", lambda m, u, i, idx: m.f(u[idx]) + i, f=linear(6, 6, False), sunk="linear")
case("functional_linear", lambda m, u, i, idx: F.linear(u[idx], m.w, m.b) + i, w=parameter(6, 6),
     b=parameter(6), sunk="linear")
case("linear_of_one", lambda m, us, i, idx: m.f(us[idx].unsqueeze(-1)) + i, f=linear(1, 6),
     sunk="linear")
case("linear_tokens", lambda m, ut, it, idx: m.f(ut[idx]) + it, f=linear(6, 6), sunk="linear")
case("linear_over_tokens", lambda m, ut, it, idx: m.f(ut[idx].transpose(1, 2)).mT + it,
     f=linear(4, 4), sunk="linear")
case("linear_4d", lambda m, ut, it, idx: m.f(ut[idx].view(-1, 2, 2, 6)).flatten(1, 2) + it,
     f=linear(6, 6), sunk="linear")
case("mlp", lambda m, u, i, idx: m.f(u[idx]) + i, sunk="linear relu",
     f=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)))
case("residual_mlp", lambda m, u, i, idx: u[idx] + m.g(F.gelu(m.f(u[idx]))) + i, f=linear(6, 8),
     g=linear(8, 6), sunk="linear gelu", split="add")
case("mlp_of_both", lambda m, u, i, idx: m.g(torch.relu(m.f(u[idx]) + i)), f=linear(6, 6),
     g=linear(6, 4), split="linear", kept="linear relu")
case("two_towers", lambda m, u, i, idx: (m.f(u[idx]).tanh() * m.g(i).tanh()).sum(-1), f=linear(6,
     8),
     g=linear(6, 8), split="linear tanh", kept="mul sum")
case("shared_weights", lambda m, u, i, idx: m.f(u[idx]) + m.f(i), f=linear(6, 6), split="linear")
case("tied_weights", lambda m, u, i, idx: F.linear(torch.relu(m.f(u[idx])), m.f.weight.t()) + i,
     f=linear(6, 8), sunk="linear relu")
case("scaled_weights", lambda m, u, i, idx: F.linear(u[idx], m.w * m.a) + i, w=parameter(6, 6),
     a=parameter(6), sunk="linear")
case("addmm", lambda m, u, i, idx: torch.addmm(m.b, u[idx], m.w) + i, w=parameter(6, 6),
     b=parameter(6), sunk="addmm")
case("addmm_onto_items", lambda m, u, i, idx: torch.addmm(i, u[idx], m.w, alpha=0.3),
     w=parameter(6, 6))
case("addmm_scaled", lambda m, u, u2, i, idx: torch.addmm(u2[idx], u[idx], m.w, beta=2) + i,
     w=parameter(6, 6), sunk="addmm")
case("mm", lambda m, u, i, idx: torch.mm(u[idx], m.w) + i, w=parameter(6, 6), sunk="mm")
case("mm_left", lambda m, u, i, idx: torch.mm(m.w, u[idx].t()).t() + i, w=parameter(6, 6),
     sunk="mm")
case("at", lambda m, u, i, idx: u[idx] @ m.w + i, w=parameter(6, 6), sunk="matmul")
case("at_tokens", lambda m, ut, it, idx: ut[idx] @ m.w + it, w=parameter(6, 6), sunk="matmul")
case("at_left_tokens", lambda m, ut, it, idx: m.w @ ut[idx] + it, w=parameter(4, 4), sunk="matmul")
case("mv", lambda m, u, i, idx: torch.mv(u[idx], m.w)[:, None] + i, w=parameter(6), sunk="mv")
case("at_vector", lambda m, ut, i, idx: (ut[idx] @ m.w).sum(1)[:, None] + i, w=parameter(6),
     sunk="matmul sum")
case("batched_weights", lambda m, ut, it, idx: torch.bmm(ut[idx].transpose(0, 1), m.w)
     .transpose(0, 1) + it, w=parameter(4, 6, 6), sunk="bmm")
case("matmul_4d_weights", lambda m, ut, it, idx: (ut[idx][:, :, None] @ m.w).squeeze(2) + it,
     w=parameter(4, 6, 6), sunk="matmul")
case("bmm_expanded_weights", lambda m, ut, it, idx: torch.bmm(
     m.w.expand(it.shape[0], 4, 4), ut[idx]) + it, w=parameter(4, 4))
case("baddbmm", lambda m, ut, it, idx: torch.baddbmm(
     m.b, ut[idx].transpose(0, 1), m.w).transpose(0, 1) + it, b=parameter(4, 1, 6),
     w=parameter(4, 6, 6), sunk="baddbmm")
case("tensordot", lambda m, ut, it, idx: torch.tensordot(ut[idx], m.w, ([2], [0])) + it,
     w=parameter(6, 6), split="mm")
case("multi_dot", lambda m, u, i, idx: torch.linalg.multi_dot((u[idx], m.a, m.b)) + i,
     a=parameter(6, 2), b=parameter(2, 6), split="mm",
     not_exportable="Constraints violated")
case("low_rank", lambda m, u, i, idx: u[idx] @ m.a @ m.b + i, a=parameter(6, 2), b=parameter(2, 6),
     sunk="matmul")
case("bilinear_same", lambda m, u, u2, i, idx: m.f(u[idx], u2[idx]) + i, split="*",
     f=lambda: nn.Bilinear(6, 6, 6))
case("bilinear_across", lambda m, u, i, idx: m.f(u[idx], i), f=lambda: nn.Bilinear(6, 6, 4))
case("linear_of_vendor", lambda m, u, v, i, idx, iv: m.f(u[idx]) + m.g(v[iv]) + i, f=linear(6, 6),
     g=linear(6, 6), split="linear linear@vendor", kept="add")
case("linear_of_items", lambda m, u, i, idx: m.f(i) + u[idx].exp(), f=linear(6, 6), sunk="exp",
     kept="linear")
case("gru", lambda m, hist, q, idx: m.f(hist[idx])[1][0] * q,
     f=lambda: nn.GRU(8, 8, batch_first=True))

# Rows with rows of the same level.
case("bmm_same", lambda m, ut, ut2, i, idx: torch.bmm(ut[idx], ut2[idx].mT).sum((1, 2))[:,
     None] + i,
     sunk="bmm sum")
case("matmul_same", lambda m, ut, ut2, it, idx: ut[idx] @ ut2[idx].mT @ it, split="matmul")
case("gram", lambda m, ut, i, idx: (ut[idx].mT @ ut[idx]).sum(1) * i, sunk="matmul sum")
case("baddbmm_same", lambda m, ut, ut2, i, idx: torch.baddbmm(ut[idx] @ ut2[idx].mT, ut[idx],
     ut2[idx].mT).sum((1, 2))[:, None] + i, sunk="baddbmm sum")
case("dot_same", lambda m, u, u2, i, idx: (u[idx] * u2[idx]).sum(-1, keepdim=True) + i,
     sunk="mul sum")
case("dot_by_bmm", lambda m, u, u2, i, idx: torch.bmm(u[idx][:, None], u2[idx][..., None])[:, :, 0]
     + i, sunk="bmm")
case("outer_same", lambda m, u, u2, i, idx: (u[idx][:, :, None] * u2[idx][:, None]).sum(1) + i,
     sunk="mul sum")

# Rows of one level with rows of another: not to be moved.
case("dot_across", lambda m, u, i, idx: (u[idx].exp() * i).sum(-1), sunk="exp", kept="mul sum")
case("bmm_across", lambda m, ut, it, idx: torch.bmm(ut[idx].exp(), it.mT).flatten(1), sunk="exp",
     kept="bmm")
case("matmul_across", lambda m, ut, i, idx: (ut[idx].tanh() @ i.unsqueeze(-1)).squeeze(-1),
     sunk="tanh", kept="matmul")
case("outer_across", lambda m, u, i, idx: (u[idx].exp()[:, :, None] * i[:, None, :]).flatten(1),
     sunk="exp", kept="mul")
case("generated_weights", lambda m, u, i, idx: torch.bmm(i[:, None], m.f(u[idx]).view(-1, 6, 4))
     .squeeze(1), f=linear(6, 24), split="linear", kept="bmm")

# einsum.
EINSUM_SUNK = {  # of one user tensor [B, 6] and weights
    "bd,de->be": (6, 6),
    "bd,ed->be": (6, 6),
    "ed,bd->be": (6, 6),
    "...d,de->...e": (6, 6),
    "b d, d e -> b e": (6, 6),
    "xy,yz->xz": (6, 6),
    "bd,d->bd": (6,),
}


def with_weights(equation):
    if equation.startswith("ed"):
        return lambda m, u, i, idx: torch.einsum(equation, m.w, u[idx]) + i
    return lambda m, u, i, idx: torch.einsum(equation, u[idx], m.w) + i


for number, (equation, shape) in enumerate(EINSUM_SUNK.items()):
    case(f"einsum_weights_{number}", with_weights(equation), w=parameter(*shape), sunk="einsum")

case("einsum_batch_last", lambda m, u, i, idx: torch.einsum("bd,de->eb", u[idx], m.w).t() + i,
     w=parameter(6, 6), sunk="einsum")
case("einsum_implicit", lambda m, u, i, idx: torch.einsum("bc,cd", u[idx], m.w) + i,
     w=parameter(6, 6), sunk="einsum")
case("einsum_tokens", lambda m, ut, it, idx: torch.einsum("btd,de->bte", ut[idx], m.w) + it,
     w=parameter(6, 6), sunk="einsum")
case("einsum_heads", lambda m, ut, i, idx: torch.einsum("btd,hde->bhte", ut[idx], m.w).sum(
     (1, 2)) + i, w=parameter(2, 6, 6), sunk="einsum sum")
case("einsum_reduce", lambda m, ut, i, idx: torch.einsum("btd->bd", ut[idx]) + i, sunk="einsum")
case("einsum_permute", lambda m, ut, it, idx: torch.einsum("btd->dbt", ut[idx]).exp()
     .permute(1, 2, 0) + it, sunk="exp")
case("einsum_diagonal", lambda m, ut, i, idx: torch.einsum("btt->bt", ut[idx][..., :4]).exp()
     .sum(1, keepdim=True) + i, sunk="exp sum")
case("einsum_same", lambda m, ut, ut2, i, idx: torch.einsum("btd,bsd->bts", ut[idx], ut2[idx])
     .sum((1, 2))[:, None] + i, sunk="einsum sum")
case("einsum_dot", lambda m, u, u2, i, idx: torch.einsum("bd,bd->b", u[idx], u2[idx])[:, None] + i,
     sunk="einsum")
case("einsum_three", lambda m, u, u2, i, idx: torch.einsum("bd,de,be->b", u[idx], m.w, u2[idx])
     [:, None] * i, w=parameter(6, 6), sunk="einsum")
case("einsum_across", lambda m, ut, i, idx: torch.einsum("btd,bd->bt", ut[idx].exp(), i),
     sunk="exp",
     kept="einsum")
case("einsum_outer_across", lambda m, u, i, idx: torch.einsum("bi,bj->bij", u[idx].exp(), i),
     sunk="exp", kept="einsum")
case("einsum_three_across", lambda m, u, i, idx: torch.einsum("bd,de,be->b", u[idx], m.w, i),
     w=parameter(6, 6))
case("experts", lambda m, u, i, idx: torch.einsum("be,beo->bo", m.gate(u[idx]).softmax(-1),
     torch.einsum("bd,edo->beo", i, m.w)), gate=linear(6, 4), w=parameter(4, 6, 2), sunk="softmax",
     split="linear")
case("einsum_over_rows", lambda m, u, i, idx: torch.einsum("bd,be->de", u[idx], i), kept="einsum")
case("einsum_rows_with_rows", lambda m, u, i, idx: torch.einsum("bd,cd->bc", u[idx], i).sum(1),
     kept="einsum")
case("einsum_sum_of_rows", lambda m, u, i, idx: i * torch.einsum("bd->d", u[idx]), kept="einsum")
case("einsum_batch_in_one", lambda m, u, i, idx: torch.einsum("bd,cd->b", u[idx], i), kept="einsum")
