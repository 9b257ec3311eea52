"""Compares a rewritten graph with its original, op by op, in float64, on random trees.

Every value of the original has a counterpart, lazy or not, in the new graph. Both graphs are run,
and each counterpart is gathered here, by other code than the pass emits. So a wrong rule is named
at the op where it was applied, with the model's line.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from ikbo_tree.rewriting.arguments import arranged, swapped_args
from ikbo_tree.rewriting.capture import Captured
from ikbo_tree.rewriting.errors import RewriteError
from ikbo_tree.rewriting.inputs import Declared
from ikbo_tree.rewriting.lineage import Found, Place
from ikbo_tree.rewriting.random_inputs import random_inputs, with_and_without_spare_rows
from ikbo_tree.rewriting.refusals import source
from ikbo_tree.rewriting.values import Cat, Dense, Index, Later, Lazy, Path

TOLERANCE = 1e-9
"""Of float64 values, relative to the largest of a tensor: sums in another order err by 1e-13."""
MOST = 200
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def validate(
    captured: Captured,
    graph: fx.Graph,
    env: Mapping[fx.Node, Any],
    given: Declared,
    seconds: float,
    results: Mapping[fx.Node, Found] | None = None,
) -> list[dict[str, int]]:
    """Compares on trees of chosen and random sizes until the time is up, on two at least.

    Args:
        captured: the original.
        graph: the new graph, with every node that counterparts name.
        env: the counterpart of each original node.
        given: the declarations.
        seconds: to spend.
        results: where results have their rows; given for trees with a capacity, on which it is
            tried that rows beyond the live ones do nothing.

    Returns:
        The rows of each level, for every tree.

    Raises:
        RewriteError: a value differs.
    """
    root = copy.deepcopy(captured.module).double()
    old = fx.GraphModule(root, captured.module.graph)
    new = fx.GraphModule(root, graph)
    begin = time.monotonic()
    done: list[dict[str, int]] = []
    for seed, rows in enumerate(_sizes(given.all_levels())):
        if (len(done) >= 2 and time.monotonic() - begin > seconds) or len(done) == MOST:
            break
        inputs = random_inputs(given, rows, seed, torch.float64)
        flat = pytree.tree_leaves(inputs)
        was, now = _Run(old), _Run(new)
        with torch.no_grad():
            try:
                was.run(*flat, enable_io_processing=False)
            except Exception:
                # The original does not take such a tree, as where it views a batch of one.
                if seed == 0:
                    raise
                continue
            now.run(*flat, enable_io_processing=False)
        _compare(captured.module.graph, env, was.values, now.values, rows)
        if results is not None:
            _check_capacity(new, given, rows, seed, results)
        done.append(dict(rows))
    return done


def _check_capacity(
    new: fx.GraphModule,
    given: Declared,
    rows: Mapping[str, int],
    seed: int,
    results: Mapping[fx.Node, Found],
) -> None:
    """Raises if results change by two more rows a level that hold nothing of use."""
    capacity = {level: n + 2 for level, n in rows.items()}
    spoilt, alone = with_and_without_spare_rows(given, capacity, rows, seed)
    runs = [_Run(new), _Run(new)]
    with torch.no_grad():
        for run, inputs in zip(runs, (spoilt, alone), strict=True):
            run.run(*pytree.tree_leaves(inputs), enable_io_processing=False)
    for node in new.graph.output_node().all_input_nodes:
        place, (found, expected) = results.get(node), (run.values[node] for run in runs)
        if isinstance(place, Place) and place.level in rows:
            live = rows[place.level]
            found, expected = by_rows(found, place), by_rows(expected, place)
            if found[live:].any():
                raise RewriteError(f"{node} is not zero in rows beyond the live {dict(rows)}")
            found = found[:live]
        error = _difference(expected, found)
        if error is not None:
            where = f"on a tree with capacity {capacity} and rows {dict(rows)}"
            raise RewriteError(f"{node.target} ({node.name}) {error}, {where}{source(node)}")


def by_rows(x: Tensor, place: Place) -> Tensor:
    """[rows, outer, inner, ...]."""
    outer, inner = place.merged
    apart = x.movedim(place.dim, 0)
    return apart.reshape(outer, -1, inner, *apart.shape[1:]).movedim(1, 0)


def _sizes(levels: list[str]) -> Iterator[dict[str, int]]:
    """Rows of each level: uneven, equal, one of each, then at random."""
    yield {level: 3 + 4 * i for i, level in enumerate(levels)}
    yield dict.fromkeys(levels, 4)
    yield dict.fromkeys(levels, 1)
    yield {level: 1 if i == 0 else 6 for i, level in enumerate(levels)}
    generator = torch.Generator().manual_seed(0)
    while True:
        most = [int(x) for x in torch.randint(1, 30, (len(levels),), generator=generator)]
        yield dict(zip(levels, sorted(most), strict=True))


class _Run(fx.Interpreter):
    """Runs a graph in float64, whatever dtypes it names, and keeps every value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch.ops.aten.rms_norm.default and len(n.args) < 4:
            # Without an eps it takes that of its dtype, which is another one here.
            x, shape, weight = (*n.args, None)[:3]
            eps = torch.finfo(n.meta["val"].dtype).eps
            args: Any = self.map_nodes_to_values((x, shape, weight), n)
            value = n.target(*args, eps)
        else:
            value = super().run_node(n)
        self.values[n] = value
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(_wide, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None  # the guards of export, which name dtypes


def _wide(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in _FLOATS else x


def _compare(
    graph: fx.Graph,
    env: Mapping[fx.Node, Any],
    was: Mapping[fx.Node, Any],
    now: Mapping[fx.Node, Any],
    rows: Mapping[str, int],
) -> None:
    for node in graph.nodes:
        if node not in env or node.op in ("placeholder", "get_attr"):
            continue
        error = _difference(was[node], counterpart(env[node], now))
        if error is not None:
            raise RewriteError(
                f"{node.target} ({node.name}) {error}, on a tree with rows {dict(rows)}"
                f"{source(node)}"
            )


def _difference(was: Any, now: Any) -> str | None:
    if isinstance(was, (tuple, list)):
        pairs = zip(was, now, strict=True)
        return next((e for a, b in pairs if b is not None and (e := _difference(a, b))), None)
    if not isinstance(was, Tensor):
        return None if was == now else f"is {now}, should be {was}"
    if was.shape != now.shape or was.dtype != now.dtype:
        return f"is {list(now.shape)} {now.dtype}, should be {list(was.shape)} {was.dtype}"
    if not was.numel():
        return None
    if not was.is_floating_point():
        return None if torch.equal(was, now) else "has other integers"
    finite = torch.isfinite(was)
    if not torch.equal(torch.nan_to_num(was[~finite], 7.0), torch.nan_to_num(now[~finite], 7.0)):
        return "is not finite in other places"
    scale = was[finite].abs().max().item() if finite.any() else 0.0
    off = (was[finite] - now[finite]).abs()
    if not (off <= TOLERANCE * scale + 1e-300).all():
        return f"differs by {off.max().item():.3g}, its largest value being {scale:.3g}"
    return None


def counterpart(value: Any, now: Mapping[fx.Node, Any]) -> Any:
    """A value of the pass as the tensor it stands for."""
    if isinstance(value, (tuple, list)):
        return [None if x is None else counterpart(x, now) for x in value]
    if isinstance(value, fx.Node):
        return now[value]
    if isinstance(value, Dense):
        return now[value.node]
    if isinstance(value, Index):
        return _composed(value.path, now).to(value.dtype)
    if isinstance(value, Cat):
        return torch.cat([counterpart(x, now) for x in value.parts], value.dim)
    if isinstance(value, Later):
        args = swapped_args(value.args, lambda x: counterpart(x, now))
        positional, named = arranged(value.target, args)
        return value.target(*positional, **named)
    if isinstance(value, Lazy):
        x, index = now[value.node], _composed(value.path, now)
        rows = x.movedim(value.dim, 0)
        outer, inner = value.merged
        rows = rows.reshape(outer, -1, inner, *rows.shape[1:])[:, index].flatten(0, 1)
        return rows.flatten(0, 1).movedim(0, value.dim)
    return value


def _composed(path: Path, now: Mapping[fx.Node, Any]) -> Tensor:
    index: Tensor = now[path[0].index]
    for step in path[1:]:
        index = now[step.index][index]
    return index
