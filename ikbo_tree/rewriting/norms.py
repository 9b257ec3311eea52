"""Layer and RMS normalisation over features of several levels, where a product follows.

What is normalised is x = [x_1 ... x_G], the x_g of different levels. Means and squares are taken of
each x_g on its own rows, and put together as those of samples are (Chan, Golub, LeVeque 1983):

    m = sum of n_g m_g / n    S = sum of |x_g - m_g|^2 + n_g (m_g - m)^2    r = (S/n + eps)^-1/2

A product with W then needs no normalised x: with V = W times the norm's weight, column by column,

    W norm(x) = r (sum of V_g (x_g - m_g) + (m_g - m) V_g 1) + W bias

so that each level's columns are multiplied on that level's rows. Parts are centred on their own
means, not on 0, or large means would cost digits. 16-bit values stay in one piece.
"""

from __future__ import annotations

from typing import Any

import torch

from ikbo_tree.rewriting import wide
from ikbo_tree.rewriting.builder import aten
from ikbo_tree.rewriting.engine import Call, Engine, path_of, structural
from ikbo_tree.rewriting.splitting import added
from ikbo_tree.rewriting.values import Cat, Later, Value


@structural("layer_norm", "rms_norm")
def normalised(engine: Engine, call: Call) -> Value | None:
    """Put off until a product takes it by levels, or something else takes it whole."""
    x = call.args["input"]
    if not isinstance(x, Cat) or wide.is_short(engine, x):
        return None
    if x.dim != len(call.out.shape) - 1 or len(call.args["normalized_shape"]) != 1:
        return None
    paths = {path_of(part) for part in x.parts}
    if len(paths) < 2 or any(isinstance(part, Cat) for part in x.parts):
        return None
    args = dict(call.args)
    if args["eps"] is None:
        args["eps"] = torch.finfo(call.out.dtype).eps
    engine.done = ("put off", ())
    return Later(call.target, args, call.out)


@structural("linear")
def linear(engine: Engine, call: Call) -> Value | None:
    """Of what was normalised, by levels."""
    normed, weight, bias = (call.args[name] for name in ("input", "weight", "bias"))
    if not isinstance(normed, Later):
        return None
    apply, given = engine.apply, normed.args
    scaled = weight
    if given["weight"] is not None:
        scaled = apply(aten.mul.Tensor, weight, given["weight"])
    levels = _levels(engine, given["input"], scaled)
    total = sum(width for _, _, width in levels)
    if "bias" in given:
        y, squares = _centred(engine, levels, total)
    else:
        y = added(engine, [apply(aten.linear.default, x, v) for x, v, _ in levels])
        squares = added(engine, [_squares(engine, x) for x, _, _ in levels])
    mean = apply(aten.div.Tensor, squares, total)
    scale = apply(aten.rsqrt.default, apply(aten.add.Scalar, mean, given["eps"]))
    y = apply(aten.mul.Tensor, y, scale)
    if given.get("bias") is not None:
        own = apply(aten.mv.default, weight, given["bias"])
        bias = own if bias is None else apply(aten.add.Tensor, own, bias)
    if bias is not None:
        y = apply(aten.add.Tensor, y, bias)
    engine.done = ("split", path_of(y))
    return y  # type: ignore[no-any-return]


def _levels(engine: Engine, x: Cat, weight: Value) -> list[tuple[Value, Value, int]]:
    """The parts of each level as one, the columns of the weight that meet them, their width."""
    found: dict[Any, list[tuple[Value, Value, int]]] = {}
    at = 0
    for part, width in zip(x.parts, x.widths, strict=True):
        columns = engine.apply(aten.slice.Tensor, weight, 1, at, at + width)
        found.setdefault(path_of(part), []).append((part, columns, width))
        at += width
    levels = []
    for own in found.values():
        parts, columns, widths = zip(*own, strict=True)
        if len(own) > 1:
            part = engine.apply(aten.cat.default, list(parts), x.dim)
            levels.append((part, engine.apply(aten.cat.default, list(columns), 1), sum(widths)))
        else:
            levels.append(own[0])
    return levels


def _centred(
    engine: Engine, levels: list[tuple[Value, Value, int]], total: int
) -> tuple[Value, Value]:
    """W (x - m) and |x - m|^2, by levels."""
    apply = engine.apply
    means = [apply(aten.mean.dim, x, [-1], True) for x, _, _ in levels]
    weighed = [
        apply(aten.mul.Tensor, m, width / total)
        for m, (_, _, width) in zip(means, levels, strict=True)
    ]
    mean = added(engine, weighed)
    products, squares, offs, sums = [], [], [], []
    for own, (x, v, width) in zip(means, levels, strict=True):
        centred = apply(aten.sub.Tensor, x, own)
        off = apply(aten.sub.Tensor, own, mean)
        products.append(apply(aten.linear.default, centred, v))
        squares.append(_squares(engine, centred))
        squares.append(apply(aten.mul.Tensor, apply(aten.mul.Tensor, off, off), width))
        offs.append(off)
        sums.append(apply(aten.sum.dim_IntList, v, [1], True))
    off = apply(aten.cat.default, offs, -1)
    products.append(apply(aten.linear.default, off, apply(aten.cat.default, sums, 1)))
    return added(engine, products), added(engine, squares)


def _squares(engine: Engine, x: Value) -> Value:
    """|x|^2 of each row, [..., 1]."""
    square = engine.apply(aten.mul.Tensor, x, x)
    return engine.apply(aten.sum.dim_IntList, square, [-1], True)  # type: ignore[no-any-return]
