"""Examples in docstrings say what happens."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import ikbo_tree
import ikbo_tree.mapping
from ikbo_tree import BroadcastTree


def modules():
    for package in (ikbo_tree, ikbo_tree.kernels, ikbo_tree.mapping):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            last = found.name.rpartition(".")[2]
            # Kernels of one GPU family have no examples, and __main__ runs.
            if not last.startswith(("triton_", "gluon_", "__main__")):
                yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_examples(name):
    known = {"BroadcastTree": BroadcastTree, "torch": torch, "ikbo": ikbo_tree}
    torch.manual_seed(0)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module, name, extraglobs=known):
        # What torch.compile has put into an example's globals it takes out again, much later.
        runner.run(test, clear_globs=False)
    assert runner.summarize().failed == 0


def test_there_are_examples():
    assert sum("    >>> " in (m.__doc__ or "") for m in vars(ikbo_tree).values()) > 5
