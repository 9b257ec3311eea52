"""The search behind `ikbo-tree fuzz`, also for an op of your own; needs the extra `testing`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ikbo_tree.testing.cases import CASES
from ikbo_tree.testing.check import CheckError, check_op
from ikbo_tree.testing.strategies import trees
from ikbo_tree.tree import BroadcastTree


def known_ops() -> tuple[str, ...]:
    """Names of the registered cases."""
    return tuple(CASES)


def find_failure(
    op: str,
    *,
    impl: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    examples: int = 300,
    seed: int = 0,
    max_depth: int = 5,
    max_rows: int = 300,
    on_example: Callable[[], object] | None = None,
) -> CheckError | None:
    """Runs `check_op` on random trees; the smallest failure found, or None.

    Args:
        op: a registered case.
        impl: the implementation under test.
        dtype: of the tensors.
        device: where the implementation runs.
        examples: trees to try; as many again may be tried to make a failing one smaller.
        seed: of everything random: the same seed tries the same trees.
        max_depth: most levels of a tree, 1 to 5.
        max_rows: most rows of a level.
        on_example: called before each tree, e.g. to move a progress bar.
    """
    import hypothesis
    from hypothesis import strategies as st

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(trees(max_depth=max_depth, max_rows=max_rows), st.integers(0, 2**16))
    def run(tree: BroadcastTree, case: int) -> None:
        if on_example is not None:
            on_example()
        check_op(op, tree, impl=impl, dtype=dtype, seed=case, device=device)

    try:
        run()
    except CheckError as error:
        return error
    return None
