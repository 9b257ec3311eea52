"""Tools for tests of tree ops and tree models.

check_op(op, tree, ...)        holds an op to every contract, on one tree
check_model(flat, fast, ...)   a tree model against the flat model that it stands for
assert_within_budget(...)      a tolerance that is computed from float64 and float32 results
tree_code(tree)                a tree as Python source

strategies.trees()             hypothesis strategies (needs the extra `testing`)
oracles                        every op as naive NumPy loops
cases                          random calls of every op; register those of your own
fuzzing.find_failure(op)       the search behind `ikbo-tree fuzz` (needs `testing`)
poison                         NaN in fresh memory, canaries around buffers
profiles.load()                hypothesis profiles `default` and `nightly`
"""

from ikbo_tree.testing.budget import BudgetError, Spent, assert_within_budget
from ikbo_tree.testing.check import CheckError, check_op
from ikbo_tree.testing.model import ModelReport, check_model
from ikbo_tree.testing.treecode import tree_code, with_capacity

__all__ = [
    "BudgetError",
    "CheckError",
    "ModelReport",
    "Spent",
    "assert_within_budget",
    "check_model",
    "check_op",
    "tree_code",
    "with_capacity",
]
