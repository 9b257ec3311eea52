"""`rewrite`: from a finished model to its broadcast-free equivalent, and the report on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ikbo_tree.tree import BroadcastTree

if TYPE_CHECKING:
    from ikbo_tree.rewriting.report import Report


def rewrite(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...],
    *,
    levels: Mapping[str, str],
    broadcasts: Mapping[str, tuple[str, str]] | None = None,
    counts: Mapping[str, tuple[str, str]] | None = None,
    compact: Mapping[str, str] | None = None,
    tree: BroadcastTree | None = None,
    rows: Mapping[str, tuple[int, int, int]] | None = None,
    profit: bool = True,
    check_seconds: float = 5.0,
) -> tuple[nn.Module, Report]:
    """Rewrites a finished PyTorch model so that every op runs on its coarsest rows.

    The model is captured by `torch.export` as ATen ops and interpreted: a gather along a declared
    map is put off, past every op that treats the rows as a batch. Products of concatenations are
    split by level, attention to coarse keys and values becomes `target_attention`. An op without a
    rule is kept, on gathered operands. Lineage follows from the maps that are declared here, never
    from sizes. The result is then checked against the original, op by op, in float64.

    Args:
        model: in evaluation mode.
        example_inputs: by name, or in the order of the model's `forward`. The result takes any
            numbers of rows; those of the example decide what pays.
        levels: for each input with rows in dim 0 the level they belong to.
        broadcasts: for each input that is a map, (fine, coarse): [rows of fine], any integers, the
            coarse row of each. Maps that compose (item to vendor, vendor to user, item to user)
            must agree, which the rewritten model asserts. A `BroadcastTree` among the inputs
            declares its maps by itself.
        counts: for each input with numbers of children, (coarse, fine), as `repeat_interleave`
            takes them.
        compact: for inputs that arrive already broadcast, the coarser level they belong to. The
            rewritten model takes them there, and a `tree` as one more keyword.
        tree: an example of a tree that the rewritten model shall take as one more keyword, for
            `compact` and in place of inputs that are maps or counts between its levels. It says
            which levels there are, whether they are sorted, and how many rows they have, which
            decides what pays. A tree with capacity makes a model that reads live counts: rows
            beyond them may hold anything, and are zero in the results. Default with `compact` a
            chain of its levels, in their order, sorted, two rows below each.
        rows: for some levels (least, usual, most) rows. What pays is decided on the usual ones
            instead of the example's, and `report.dynamic_shapes()` has the others.
        profit: leave alone what saves no work on the example's rows, counted as in
            `rewriting.profit`; False rewrites whatever can be.
        check_seconds: how long to compare on random trees; 0 for no check.

    Returns:
        The rewritten model, which shares the parameters and buffers of the original and has its
        call convention (with a tree among the inputs they are its `program`'s), usable under
        torch.compile and torch.export; and a report. Its nodes have the level of their rows as
        `meta["custom"]["level"]`, which exported programs keep.

    Raises:
        TreeError: declarations that do not fit the inputs.
        UnsupportedError: the model is in training mode, random, or no single graph; or `tree` has
            a capacity and an op takes rows of a level together.
        RewriteError: the check found a difference, which is an error in a rule.

    >>> class Ranker(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.user, self.top = nn.Linear(4, 8), nn.Linear(8 + 3, 1)
    ...
    ...     def forward(self, user_x, item_x, item_to_user):
    ...         user = torch.relu(self.user(user_x[item_to_user]))
    ...         return self.top(torch.cat([user, item_x], 1))
    >>> inputs = torch.randn(2, 4), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> fast, report = rewrite(
    ...     Ranker().eval(),
    ...     inputs,
    ...     levels={"user_x": "user", "item_x": "item"},
    ...     broadcasts={"item_to_user": ("item", "user")},
    ...     check_seconds=0.1,
    ... )
    >>> [(step.name, step.action) for step in report.steps if step.action != "kept"]
    [('index', 'gathered'), ('linear', 'sunk'), ('relu', 'sunk'), ('linear_1', 'split')]
    """
    # torch.export alone takes half as long to import as all else together.
    from ikbo_tree.rewriting.capture import Wrapped, capture
    from ikbo_tree.rewriting.graph_pass import Rewriting
    from ikbo_tree.rewriting.inputs import declared
    from ikbo_tree.rewriting.profit import Profit
    from ikbo_tree.rewriting.validate import validate

    given = declared(
        model, example_inputs, levels, broadcasts or {}, counts or {}, compact or {}, tree, rows
    )
    captured = capture(Wrapped(model, given) if given.wrapped else model, given)
    prices = Profit(captured, given)
    if profit:
        rewriting = prices.best()
    else:
        rewriting = Rewriting(captured, given)
        rewriting.run()
    rewriting.report.before = dict(prices.costs(captured.module.graph))
    rewriting.report.after = dict(prices.costs(rewriting.graph))
    if check_seconds > 0:
        results = rewriting.traced().places if given.padded else None
        rewriting.report.checks = validate(
            captured, rewriting.graph, rewriting.env, given, check_seconds, results
        )
    fast = rewriting.finished()
    prices.note(rewriting)
    return fast, rewriting.report
