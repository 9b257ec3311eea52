"""Trees that tests of Triton's kernels over segments have in common."""

import pytest
import torch

from ikbo_tree import BroadcastTree
from ikbo_tree.testing.checks import CHECKS

# "reference" asks nothing of the implementation under test.
CONTRACTS = [name for name in CHECKS if name != "reference"]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def uneven(most=150):
    return BroadcastTree.from_counts({"vendor": [2, 0, 1], "item": [3, most, 2]}, root="user")


def shuffled():
    """Unsorted, with dead rows and a table."""
    maps = {"vendor": [1, 0, 1], "item": [2, 0, 0, 1, 2, 2, 0]}
    spare = {"user": 5, "vendor": 4, "item": 9}
    tree = BroadcastTree.from_parents(maps, root="user", root_rows=3, capacity=spare)
    return tree.with_table("brand", of="item", index=[2, 0, 2, 2, 1, 0, 2], rows=4, capacity=6)


def childless():
    return BroadcastTree.from_counts({"vendor": [0, 0], "item": []}, root="user")


TREES = (uneven, shuffled, childless)
