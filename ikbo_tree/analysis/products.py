"""What the ops cost that are matrix products: linear maps, dots of pairs, cross networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ikbo_tree.analysis.call import Call
from ikbo_tree.analysis.cost import Comparison, Cost, Step, Work
from ikbo_tree.kernels.common.stages import accumulator
from ikbo_tree.ops.cross_layers import CrossLayer, LowRankCross, MixtureCross, VectorCross
from ikbo_tree.tree import BroadcastTree


def linear(
    tree: BroadcastTree,
    widths: Mapping[str, int],
    out: int,
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.linear` costs.

    Args:
        tree: the tree.
        widths: K of each level or table.
        out: N, columns of the result.
        level: level of the result; default the finest of the names.
        dtype: of all tensors. Partial results are float32 (float64 for float64).

    Raises:
        TreeError: unknown names, or names on several branches.

    >>> tree = BroadcastTree.from_counts({"item": [64] * 16}, root="user")
    >>> found = linear(tree, {"user": 512, "item": 512}, 256)
    >>> found.flat.total.flops / found.tree.total.flops
    1.9692307692307693
    """
    call = Call(tree, tuple(widths), level, dtype)
    return _split(call, widths, out, 1, "linear")


def linear_compression(
    tree: BroadcastTree,
    widths: Mapping[str, int],
    out: int,
    dim: int,
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.linear_compression` costs.

    Args:
        tree: the tree.
        widths: K, embeddings of each level or table.
        out: M, embeddings of the result.
        dim: N, elements of an embedding.
        level: as in `linear`.
        dtype: as in `linear`.

    Raises:
        TreeError: as in `linear`.
    """
    call = Call(tree, tuple(widths), level, dtype)
    return _split(call, widths, out, dim, "linear_compression")


def _split(call: Call, widths: Mapping[str, int], out: int, dim: int, op: str) -> Comparison:
    """[rows, K, dim] to [rows, out, dim], by one product a level or by one of all."""
    flat = call.copies({name: width * dim for name, width in widths.items()})
    flat.append(_product(call, call.last, sum(widths.values()), out, dim, op, call.size))
    tree = []
    for name in call.chain:
        size = call.size if name == call.last else call.wide
        step = _product(call, name, widths.get(name, 0), out, dim, op, size)
        read = sum(call.gathered(above, name, out * dim, call.wide) for above in call.above(name))
        tree.append(Step(op, name, step.cost.plus(Cost(0, read))))
    return Comparison(Work(tuple(tree)), Work(tuple(flat)))


def _product(call: Call, name: str, k: int, out: int, dim: int, op: str, size: int) -> Step:
    """[rows, k, dim] by a weight [out, k], its result in elements of `size` bytes."""
    rows = call.rows(name)
    moved = (rows * k * dim + out * k) * call.size + rows * out * dim * size
    return Step(op, name, Cost(2 * rows * out * k * dim, moved))


def dot_interaction(
    tree: BroadcastTree,
    fields: Mapping[str, int],
    dim: int,
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.dot_interaction` costs.

    Counted are the products that are made: of a level's fields with themselves, a square of which
    half is kept, and with those of each level above.

    Args:
        tree: the tree.
        fields: F, vectors of each level or table.
        dim: D, their width.
        level: level of the result; default the finest of the names.
        dtype: of all tensors.

    Raises:
        TreeError: unknown names, or names on several branches.
    """
    call = Call(tree, tuple(fields), level, dtype, "fields")
    total = sum(fields.values())
    pairs = total * (total - 1) // 2
    flat = call.copies({name: count * dim for name, count in fields.items()})
    rows = call.rows()
    moved = rows * (total * dim + pairs) * call.size
    flat.append(Step("dot_interaction", call.last, Cost(2 * rows * total * total * dim, moved)))
    steps: list[Step] = []
    own: dict[str, int] = {}  # fields of each level so far, those of tables that join it among them
    passed: dict[str, int] = {}
    for name in (n for n in call.chain if n not in tree.tables):
        joined = [n for n in call.above(name) if n in tree.tables]
        count = fields.get(name, 0) + sum(fields[n] for n in joined)
        rows, met = call.rows(name), sum(own.values())
        moved = rows * fields.get(name, 0) * dim * call.size
        moved += sum(call.gathered(n, name, fields[n] * dim, call.size) for n in joined)
        moved += sum(call.gathered(n, name, width * dim, call.size) for n, width in own.items())
        if name == call.last:
            moved += sum(call.gathered(n, name, width, call.wide) for n, width in passed.items())
            moved += rows * pairs * call.size
        else:
            passed[name] = count * (count - 1) // 2 + count * met
            moved += rows * passed[name] * call.wide
        own[name] = count
        flops = 2 * rows * count * (count + met) * dim
        steps.append(Step("dot_interaction", name, Cost(flops, moved)))
    return Comparison(Work(tuple(steps)), Work(tuple(flat)))


def factorization_machine(
    tree: BroadcastTree,
    fields: Mapping[str, int],
    dim: int,
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.factorization_machine` costs.

    Three operations for each element of a field (two sums and a square), three for each of a
    level's own term, four for each that is handed down.

    Args:
        tree: the tree.
        fields: F, vectors of each level or table.
        dim: D, their width.
        level: level of the result; default the finest of the names.
        dtype: of all tensors.

    Raises:
        TreeError: unknown names, or names on several branches.
    """
    call = Call(tree, tuple(fields), level, dtype, "fields")
    total, rows = sum(fields.values()), call.rows()
    flat = call.copies({name: count * dim for name, count in fields.items()})
    cost = Cost(3 * rows * (total + 1) * dim, rows * (total + 1) * dim * call.size)
    flat.append(Step("factorization_machine", call.last, cost))
    steps = []
    for name in call.chain:
        rows, count, above = call.rows(name), fields.get(name, 0), call.above(name)
        flops = (3 * (count + 1) if count else 0) + 4 * len(above)
        moved = rows * count * dim * call.size
        moved += sum(call.gathered(n, name, 2 * dim, call.wide) for n in above)
        moved += rows * dim * (call.size if name == call.last else 2 * call.wide)
        steps.append(Step("factorization_machine", name, Cost(rows * flops * dim, moved)))
    return Comparison(Work(tuple(steps)), Work(tuple(flat)))


def cross(
    tree: BroadcastTree,
    widths: Mapping[str, int],
    layers: Sequence[CrossLayer],
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.cross` costs: layers as the op takes them, of which shapes alone are read.

    Args:
        tree: the tree.
        widths: K of each level or table.
        layers: weights on any device, `meta` as well.
        level: level of the result; default the finest of the names.
        dtype: of all tensors.

    Raises:
        TreeError: unknown names, or names on several branches.
    """
    call = Call(tree, tuple(widths), level, dtype)
    k, rows = sum(widths.values()), call.rows()
    flat = call.copies(dict(widths))
    for at, layer in enumerate(layers):
        flat += _cross_layer(call, at, layer, k)
    # The op widens what it takes.
    call = Call(tree, tuple(widths), level, accumulator(dtype))
    # `cross` splits vectors, and the first other layer behind them, in one call of `linear`.
    split = next((i for i, y in enumerate(layers) if type(y) is not VectorCross), len(layers)) + 1
    first = sum(layer.first().shape[0] for layer in layers[:split])
    steps = call.copies(dict(widths))
    if first:
        name = f"layers 0 to {min(split, len(layers)) - 1}"
        parts = _split(call, widths, first, 1, name).tree.steps
        then = sum(_then(layer) for layer in layers[:split]) * rows
        moved = rows * (2 * k + first) * call.size
        steps += [*parts, Step(f"{name}, times x0", call.last, Cost(then + 2 * rows * k, moved))]
    for at, layer in enumerate(layers[split:], start=split):
        steps += _cross_layer(call, at, layer, k)
    return Comparison(Work(tuple(steps)), Work(tuple(flat)))


def _cross_layer(call: Call, at: int, layer: CrossLayer, k: int) -> list[Step]:
    """A layer at the result's rows: its product, then x0 times the rest plus x."""
    rows, n = call.rows(), layer.first().shape[0]
    product = Cost(2 * rows * n * k, (rows * (k + n) + n * k) * call.size)
    moved = rows * (n + 3 * k) * call.size
    name = f"layer {at}"
    return [
        Step(name, call.last, product),
        Step(f"{name}, times x0", call.last, Cost(rows * (_then(layer) + 2 * k), moved)),
    ]


def _then(layer: CrossLayer) -> int:
    """Operations a row of the products behind a layer's first."""
    if isinstance(layer, LowRankCross):
        return 2 * layer.u.numel()
    if isinstance(layer, MixtureCross):
        return 2 * (layer.c.numel() + layer.u.numel())
    return 0
