"""`check_op`: holds one op, on one tree, to the contracts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ikbo_tree.testing import (  # noqa: F401  # each registers its cases
    cases_attention,
    cases_composed,
    cases_histories,
    cases_interactions,
    cases_ranking,
)
from ikbo_tree.testing.budget import Spent
from ikbo_tree.testing.cases import Call, make_call
from ikbo_tree.testing.checks import CHECKS, Bench
from ikbo_tree.testing.treecode import tree_code
from ikbo_tree.tree import BroadcastTree


class CheckError(AssertionError):
    """An op broke a contract. The message says which, on what, and how to run it again.

    Attributes:
        check: name of the check, one of `CHECKS`.
        code: Python source that runs the check again.
    """

    def __init__(self, check: str, reason: str, call: Call, code: str) -> None:
        super().__init__(check, reason, call.code, code)
        self.check = check
        self.reason = reason
        self.call = call
        self.code = code

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}\nin {self.call.code}\nagain:\n{self.code}"


def check_op(
    op: str,
    tree: BroadcastTree,
    *,
    impl: str = "auto",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str | None = None,
    checks: Sequence[str] | None = None,
) -> dict[str, Spent]:
    """Calls an op with random arguments on a tree and checks everything about the results.

    The seed chooses levels, widths, options and values. Forward against a naive float64 oracle and
    backward against the float64 reference (which finite differences of the oracle confirm), within
    the budget of `ikbo_tree.testing.budget`; gradients for subsets of the inputs; inputs and
    gradients of odd strides; NaN and Inf of one request that must reach no other, of one element
    that must reach nothing that does not depend on it; empty segments; dead rows; the same bits
    in two runs; nothing written beside a buffer; no memory read before it is written.

    Args:
        op: a registered case: the name of any public op, or your own
            (`ikbo_tree.testing.cases.op_case`).
        tree: any tree.
        impl: the implementation under test.
        dtype: of the inputs: float64, float32, float16 or bfloat16.
        seed: of everything random.
        device: where to run the implementation; default the tree's device. What should come out is
            always computed on the CPU.
        checks: names of `ikbo_tree.testing.checks.CHECKS`; default all of them.

    Returns:
        For each result, how much of its budget it used.

    Raises:
        CheckError: a contract is broken, or the op raised.

    >>> tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
    >>> spent = check_op("reduce", tree, seed=3)
    """
    device = tree.device if device is None else torch.device(device)
    call = make_call(op, tree, seed)
    bench = Bench(call, tree.to("cpu"), impl, dtype, seed, device)
    spent: dict[str, Spent] = {}
    for name in CHECKS if checks is None else checks:
        try:
            result = CHECKS[name](bench)
        except Exception as error:
            reason = str(error) if isinstance(error, AssertionError) else repr(error)
            code = rerun_code(op, tree, impl, dtype, seed, device)
            raise CheckError(name, reason, call, code) from error
        if isinstance(result, dict):
            spent = result
    return spent


def rerun_code(
    op: str,
    tree: BroadcastTree,
    impl: str,
    dtype: torch.dtype,
    seed: int,
    device: torch.device | None = None,
) -> str:
    """Python source that calls `check_op` so again."""
    where = "" if device is None or device.type == "cpu" else f', device="{device}"'
    return (
        "import torch\n"
        "from ikbo_tree import BroadcastTree\n"
        "from ikbo_tree.testing import check_op\n"
        f"tree = {tree_code(tree)}\n"
        f'check_op("{op}", tree, impl="{impl}", dtype={dtype}, seed={seed}{where})'
    )
