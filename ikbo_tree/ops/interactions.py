"""Interactions between features of several levels: dots of pairs, factorization machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.dispatch import checked_name
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.ops.checks import check_plain, check_rows, in_force
from ikbo_tree.ops.crossing import entering, joins, modulated, on_host, raised, widened
from ikbo_tree.ops.dots import Dots
from ikbo_tree.ops.memories import shape_of
from ikbo_tree.tree import BroadcastTree

ORDERS = ("tril", "triu")


def dot_interaction(
    fields: Mapping[str, Tensor],
    *,
    tree: BroadcastTree,
    level: str | None = None,
    self_interaction: bool = False,
    order: str = "tril",
    impl: str = "auto",
) -> Tensor:
    """Dot products of all pairs of fields, whatever their levels (DLRM's interaction).

    Two fields of one level are multiplied at its own rows, once a row, and the products gathered;
    a coarse and a fine one at the fine one's rows, which share the coarse field. A table's fields
    count as those of the level at which it joins.

    The flat model's fields are those of all levels side by side, in the mapping's order. Its pairs
    (i, j) come row by row of its matrix of products: with `order="tril"` (DLRM) below the diagonal,
    (1, 0), (2, 0), (2, 1), (3, 0), ...; with `order="triu"` (torchrec) above it, (0, 1), (0, 2),
    ..., (1, 2), ...

    Args:
        fields: for each level or table x [rows, F, D]: F vectors (its own number) of D elements.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        self_interaction: pairs (i, i) too, each after (before, for `"triu"`) the others of its row.
        order: of the pairs: `"tril"` or `"triu"`, as torch.tril_indices and torch.triu_indices.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the level, F (F - 1) / 2], or F (F + 1) / 2 with `self_interaction`, F the fields
        of all levels; in the fields' dtype, computed in float32 (float64 for float64). Dead rows
        are zero. Differentiable once, and nothing but the fields is kept for that.

    Raises:
        TreeError: unknown names, names on several branches; shapes, rows or devices that do not
            fit.
        TypeError: dtypes that differ, or no float dtype.
        ValueError: no such order.
        UnsupportedError: `impl` cannot run this call.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> user = torch.tensor([[[1.0, 0.0], [3.0, 2.0]], [[0.0, 1.0], [1.0, 1.0]]])
    >>> item = torch.tensor([[[1.0, 1.0]], [[2.0, 0.0]], [[0.0, 5.0]]])
    >>> dot_interaction({"user": user, "item": item}, tree=tree).tolist()
    [[3.0, 1.0, 5.0], [3.0, 2.0, 6.0], [1.0, 5.0, 5.0]]
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    steps = _checked_fields(fields, tree, level, impl)
    like = next(iter(fields.values()))
    if on_host(like):
        check_plain(impl, "dot_interaction")
    # A table's fields join those of the level that it hands to.
    joined = {n: [p for p in (*ps, n) if p == n or p in tree.tables] for n, ps in steps}
    names = [n for n, ps in joined.items() if n not in tree.tables and any(p in fields for p in ps)]
    last = steps[-1][0]
    names += [last] if last not in names else []
    owners = {field: at for at, name in enumerate(names) for field in joined[name]}
    x = []
    for at, name in enumerate(names):
        parts = [_at(v, f, name, tree, impl) for f, v in fields.items() if owners[f] == at]
        x.append(torch.cat(parts or [like.new_empty(tree.capacity(name), 0, like.shape[2])], dim=1))
    x = [
        part if name == last and on_host(like) else entering(part, tree=tree, level=name, to=last)
        for name, part in zip(names, x, strict=True)
    ]
    live = [tree.live(name) for name in names]
    routes = [tree.route(fine, name) for i, fine in enumerate(names) for name in names[:i]]
    out: Tensor = Dots.apply(  # type: ignore[no-untyped-call]
        len(names),
        tuple(owners[field] for field, v in fields.items() for _ in range(v.shape[1])),
        order,
        self_interaction,
        in_force(impl),
        *x,
        *live,
        *(m for route in routes if route is not None for m in route),
    )
    return zero_dead_rows(out.to(like.dtype), live[-1])


def _at(x: Tensor, name: str, to: str, tree: BroadcastTree, impl: str) -> Tensor:
    return raised(x if name == to else widened(x), tree=tree, level=name, to=to, impl=impl)


def factorization_machine(
    fields: Mapping[str, Tensor],
    *,
    tree: BroadcastTree,
    level: str | None = None,
    impl: str = "auto",
) -> Tensor:
    """Sum of the elementwise products of all pairs of fields, whatever their levels.

    The second-order term of a factorization machine, 0.5 ((sum of fields)^2 - sum of squares),
    before its last sum over D (the bi-interaction of neural factorization machines; `.sum(-1)`
    gives the scalar). Each level forms its own at its own rows; a level with (sum s, term m) and
    the one below it with (s', m') meet in (s + s', m + m' + s s'), which cancels less than the flat
    formula does.

    Args:
        fields: for each level or table x [rows, F, D]: F vectors (its own number) of D elements.
        tree: the tree.
        level: level of the result, at or below all names; default the finest of them.
        impl: of the tree ops inside: `"auto"`, `"reference"`, `"torch"`, ...

    Returns:
        [rows of the level, D] in the fields' dtype, computed in float32 (float64 for float64). Dead
        rows are zero. Differentiable any number of times.

    Raises:
        TreeError: unknown names, names on several branches; shapes, rows or devices that do not
            fit.
        TypeError: dtypes that differ, or no float dtype.

    >>> tree = BroadcastTree.from_counts({"item": [2, 1]}, root="user")
    >>> x = {"user": torch.tensor([[[2.0], [3.0]], [[1.0], [1.0]]]), "item": torch.ones(3, 1, 1)}
    >>> factorization_machine(x, tree=tree).flatten().tolist()
    [11.0, 11.0, 3.0]
    """
    steps = _checked_fields(fields, tree, level, impl)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    last = steps[-1][0]
    for name, producers in steps:
        total: Tensor | None = None
        if name in fields:
            x = entering(widened(fields[name]), tree=tree, level=name, to=last)
            total = x.sum(1)
            term = (total.square() - x.square().sum(1)) / 2
        for producer in producers:
            above, theirs = found.pop(producer)
            at: dict[str, Any] = {"tree": tree, "impl": impl}
            if total is None:
                total = raised(above, level=producer, to=name, **at)
                term = raised(theirs, level=producer, to=name, **at)
                continue
            at |= {"level": name, "of": producer, "dtype": total.dtype}
            term = term + modulated(total, above, theirs, **at)
            if name != last or producer != producers[-1]:
                total = modulated(total, None, above, **at)
        assert total is not None
        found[name] = (total, term)
    like = next(iter(fields.values()))
    return zero_dead_rows(found[last][1].to(like.dtype), tree.live(last))


def _checked_fields(
    fields: Mapping[str, Tensor], tree: BroadcastTree, level: str | None, impl: str
) -> list[tuple[str, list[str]]]:
    checked_name(impl)
    steps = joins("fields", tuple(fields), tree, level)
    like = next(iter(fields.values()))
    for name, x in fields.items():
        argument = f'fields["{name}"]'
        check_rows(argument, x, like, tree, name)
        if x.dim() != 3 or x.shape[2] != like.shape[-1]:
            rule = f"must have shape [rows, F, D], D = {like.shape[-1]} like the first"
            raise TreeError(argument, rule, shape_of(x))
    return steps
