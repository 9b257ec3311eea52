"""Ops that treat every element alone, on a broadcast value and across levels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewrite_cases.case import Cases, parameter

case = CASES = Cases("elementwise")

ANY_SIGN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "abs": torch.abs,
    "neg": torch.neg,
    "erf": torch.erf,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "selu": F.selu,
    "celu": F.celu,
    "log_sigmoid": F.logsigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "sign": torch.sign,
    "floor": torch.floor,
    "pow": lambda x: x.pow(2),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "nan_to_num": torch.nan_to_num,
}
POSITIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
}


def of_any_sign(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, u, i, idx: f(u[idx]) + i


def of_positive(f: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, up, i, idx: f(up[idx]) + i


for op, function in ANY_SIGN.items():
    case(op, of_any_sign(function), sunk=op)
for op, function in POSITIVE.items():
    case(op, of_positive(function), sunk=op)

# fmt: off
# Modules and parameters.
case("prelu", lambda m, u, i, idx: m.act(u[idx]) + i, act=lambda: nn.PReLU(6), sunk="prelu")
case("dropout_eval", lambda m, u, i, idx: torch.relu(m.drop(u[idx])) + i,
     drop=lambda: nn.Dropout(0.5), sunk="relu")
case("identity", lambda m, u, i, idx: torch.relu(m.same(u[idx])) + i, same=nn.Identity, sunk="relu")
case("scale_and_shift", lambda m, u, i, idx: torch.relu(u[idx] * m.a + m.b) * i,
     a=parameter(6), b=parameter(1, 6), sunk="add relu",
     split="mul")
case("scalar_parameter", lambda m, u, i, idx: torch.exp(u[idx] * m.a) + i, a=parameter(),
     sunk="mul exp")
case("buffer", lambda m, u, i, idx: torch.exp(u[idx] - m.mean) + i, sunk="sub exp",
     mean=lambda: torch.arange(6.0))

# Scalars.
case("scalars", lambda m, u, i, idx: (2 * u[idx] - 1).div(4) + i, sunk="mul sub div")
case("one_minus", lambda m, u, i, idx: (1 - u[idx]) * i, sunk="sub")
case("scalar_over", lambda m, up, i, idx: 2.0 / up[idx] + i, split="*")
case("scalar_to_the", lambda m, u, i, idx: 2.0 ** u[idx] + i, sunk="pow")
case("add_alpha", lambda m, u, i, idx: torch.add(i, u[idx], alpha=0.3), kept="add")

# Two and three operands of one level.
case("add_same", lambda m, u, u2, i, idx: torch.relu(u[idx] + u2[idx]) * i, sunk="add relu")
case("sub_same", lambda m, u, u2, i, idx: torch.relu(u[idx] - u2[idx]) + i, sunk="sub relu")
case("mul_same", lambda m, u, u2, i, idx: torch.relu(u[idx] * u2[idx]) + i, sunk="mul relu")
case("div_same", lambda m, u, up, i, idx: torch.tanh(u[idx] / up[idx]) + i, sunk="div tanh")
case("pow_same", lambda m, up, u, i, idx: up[idx] ** u[idx] + i, sunk="pow")
case("maximum_same", lambda m, u, u2, i, idx: torch.maximum(u[idx], u2[idx]) + i, sunk="maximum")
case("minimum_same", lambda m, u, u2, i, idx: torch.minimum(u[idx], u2[idx]) + i, sunk="minimum")
case("atan2_same", lambda m, u, u2, i, idx: torch.atan2(u[idx], u2[idx]) + i, sunk="atan2")
case("fmod_same", lambda m, u, up, i, idx: torch.fmod(u[idx], up[idx]) + i, sunk="fmod")
case("remainder", lambda m, u, i, idx: torch.remainder(u[idx], 0.7) + i, sunk="remainder")
case("lerp_same", lambda m, u, u2, i, idx: torch.lerp(u[idx], u2[idx], 0.3) + i, sunk="lerp")
case("addcmul_same", lambda m, u, u2, i, idx: torch.addcmul(u[idx], u2[idx], u2[idx]) + i,
     sunk="addcmul")
case("where_same", lambda m, u, u2, ub, i, idx: torch.where(ub[idx], u[idx], u2[idx]) + i,
     sunk="where")
case("masked_fill_same", lambda m, u, ub, i, idx: u[idx].masked_fill(ub[idx], -9.0) + i,
     sunk="masked_fill")
case("clamp_by_same", lambda m, u, u2, i, idx: torch.clamp(u[idx], min=u2[idx]) + i, sunk="clamp")
case("one_column", lambda m, u, us, i, idx: torch.tanh(u[idx] * us[idx][:, None]) + i,
     sunk="mul tanh")
case("tokens_and_row", lambda m, ut, u, it, idx: torch.relu(ut[idx] + u[idx][:, None]) + it,
     split="add", sunk="relu")

# Comparisons, logic, integers.
case("compare_scalar", lambda m, u, i, idx: (u[idx] > 0.2).to(i.dtype) * i, sunk="gt")
case("compare_same", lambda m, u, u2, i, idx: (u[idx] <= u2[idx]).to(i.dtype) + i, sunk="le")
case("equal_ids", lambda m, uid, ids, i, idx: (ids[idx] == uid[idx][:, None]).sum(1)[:, None] * i,
     sunk="eq sum")
case("logic", lambda m, ub, u, i, idx: (ub[idx] & ~(u[idx] > 0)).to(i.dtype) + i,
     sunk="gt bitwise_not bitwise_and")
case("logical_or", lambda m, ub, u, i, idx: torch.logical_or(ub[idx], u[idx] > 0) * i,
     sunk="gt logical_or")
case("bits", lambda m, un, un2, i, idx: ((un[idx] ^ un2[idx]) % 7) * i,
     sunk="bitwise_xor remainder")
case("shift", lambda m, un, i, idx: torch.bitwise_right_shift(un[idx], 2) + i,
     sunk="bitwise_right_shift")
case("floor_divide", lambda m, un, i, idx: (un[idx] // 4) + i, sunk="floor_divide")
case("isnan", lambda m, u, i, idx: torch.where(torch.isnan(u[idx]), 0.0, u[idx]) + i, sunk="where")

# Types and likes.
case("int_to_float", lambda m, un, i, idx: torch.sqrt(un[idx].to(i.dtype)) + i, sunk="sqrt")
case("double", lambda m, u, i, idx: torch.exp(u[idx].double()) + i, sunk="exp")
case("half_and_back", lambda m, u, i, idx: u[idx].half().to(i.dtype).neg() + i, sunk="neg")
case("type_as", lambda m, un, i, idx: torch.tanh(un[idx].type_as(i)) + i, sunk="tanh")
case("zeros_like", lambda m, u, i, idx: torch.maximum(u[idx], torch.zeros_like(u[idx])) + i,
     sunk="maximum")
case("full_like", lambda m, u, i, idx: torch.where(u[idx] > 0, torch.full_like(u[idx], 3), i),
     sunk="gt")
case("clone", lambda m, u, i, idx: torch.relu(u[idx].clone()) + i, sunk="relu")
case("contiguous", lambda m, ut, it, idx: torch.relu(ut[idx].transpose(1, 2).contiguous())
     + it.transpose(1, 2), sunk="relu")
case("detach", lambda m, u, i, idx: torch.relu(u[idx].detach()) + i, sunk="relu")

# Across levels: what is the user's own runs for users.
case("gate", lambda m, u, i, idx: torch.sigmoid(u[idx]) * i, sunk="sigmoid", kept="mul")
case("where_across", lambda m, u, ub, i, idx: torch.where(ub[idx], torch.exp(u[idx]), i),
     sunk="exp", kept="where")
case("condition_of_item", lambda m, u, ib, i, idx: torch.where(ib, torch.exp(u[idx]), i),
     sunk="exp", kept="where")
case("masked_fill_across", lambda m, u, ub, i, idx: i.masked_fill(ub[idx], 0.0) + u[idx].exp(),
     sunk="exp", kept="masked_fill")
case("maximum_across", lambda m, u, i, idx: torch.maximum(torch.exp(u[idx]), i), sunk="exp",
     kept="maximum")
case("lerp_across", lambda m, u, u2, i, idx: torch.lerp(u[idx].tanh(), i, u2[idx].sigmoid()),
     sunk="tanh sigmoid", kept="lerp")
case("add_three_levels", lambda m, u, v, i, idx, iv: u[idx].tanh() + v[iv].exp() + i,
     sunk="tanh exp@vendor", kept="add")
case("vendor_with_user", lambda m, u, v, i, vu, iv: torch.tanh(u.exp()[vu] * v)[iv] + i,
     sunk="tanh@vendor exp", kept="add")
case("by_turns", lambda m, u, i, idx: torch.exp(u[idx].tanh() + i) * u[idx].sigmoid(),
     sunk="tanh sigmoid", kept="exp")
case("more_tokens_than_user", lambda m, u, it, idx: torch.exp(u[idx])[:, None, :] + it, sunk="exp")
case("user_alone", lambda m, u, i, idx: (u.tanh(), i + u[idx].exp()), sunk="tanh exp")
