"""What a model costs, op by op: its graph, counted on the rows of an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ikbo_tree.analysis.cost import Step, Work


def of_model(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    levels: Mapping[str, str],
    broadcasts: Mapping[str, tuple[str, str]] | None = None,
    counts: Mapping[str, tuple[str, str]] | None = None,
) -> Work:
    """Operations and bytes of every op of a model, by the finest level whose rows it sees.

    The model is captured as `ikbo_tree.rewrite` captures it, and not changed. A flat model and its
    tree twin are two calls. Steps are named after the graph's nodes; `"-"` is the level of what
    has no rows.

    Args:
        model: in evaluation mode; flat, or on trees with a `BroadcastTree` among its inputs.
        example_inputs: by name, or in the order of the model's `forward`.
        levels: see `ikbo_tree.rewrite`.
        broadcasts: see `ikbo_tree.rewrite`.
        counts: see `ikbo_tree.rewrite`.

    Raises:
        TreeError: declarations that do not fit the inputs.
        UnsupportedError: the model is in training mode, random, or no single graph.

    >>> import torch
    >>> work = of_model(nn.Linear(4, 8).eval(), (torch.randn(5, 4),), levels={"input": "item"})
    >>> work.by_level()
    {'item': Cost(flops=320, bytes=400)}
    """
    # torch.export alone takes half as long to import as all else together.
    from ikbo_tree.rewriting.capture import capture
    from ikbo_tree.rewriting.cost import Counter
    from ikbo_tree.rewriting.inputs import declared

    given = declared(model, example_inputs, levels, broadcasts or {}, counts or {}, {}, None)
    captured = capture(model, given)
    counter = Counter(captured, given)
    backwards = list(counter.costs(captured.module.graph))
    steps = [Step(node.name, counter.level(node), cost) for node, cost in reversed(backwards)]
    return Work(tuple(steps))
