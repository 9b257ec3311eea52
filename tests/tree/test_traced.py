"""Trees inside torch.compile and torch.export, in threads and in fresh processes."""

import io
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch.export import Dim

from ikbo_tree import BroadcastTree


def random_tree(rng, *, capacity=None, tables=False):
    """Sizes of one class: every level has at least two rows."""
    users = int(rng.integers(2, 8))
    vendors = rng.integers(2, 6, users)
    items = rng.integers(2, 6, int(vendors.sum()))
    tree = BroadcastTree.from_counts(
        {"vendor": vendors, "item": items}, root="user", capacity=capacity
    )
    if tables:
        index = rng.integers(0, 3, int(vendors.sum()))
        tree = tree.with_table("brand", of="vendor", index=index, rows=3)
    return tree


def gathered(tree, x):
    return x[tree.ancestors("item", of="user")] * tree.capacity("vendor")


@pytest.fixture
def compile_counter():
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounter

    return CompileCounter()


@pytest.mark.parametrize("capacity", [None, {"user": 16, "vendor": 64, "item": 512}], ids=str)
def test_new_trees_do_not_recompile(compile_counter, capacity):
    compiled = torch.compile(gathered, fullgraph=True, backend=compile_counter)
    rng = np.random.default_rng(0)
    for count in range(100):
        tree = random_tree(rng, capacity=capacity, tables=True)
        x = torch.randn(tree.capacity("user"), 3)
        assert torch.equal(compiled(tree, x), gathered(tree, x))
        if count == 2:  # the second tree makes sizes symbolic
            settled = compile_counter.frame_count
    assert compile_counter.frame_count == settled


def test_a_closed_over_tree_compiles(compile_counter):
    tree = random_tree(np.random.default_rng(1))
    compiled = torch.compile(lambda x: gathered(tree, x), fullgraph=True, backend=compile_counter)
    x = torch.randn(tree.rows("user"), 3)
    assert torch.equal(compiled(x), gathered(tree, x))


def test_a_deep_tree_composes_inside_a_trace(compile_counter):
    counts = {f"l{i}": [2] * 2**i for i in range(9)}
    tree = BroadcastTree.from_counts(counts, root="root")

    def deep(tree, x):
        return x[tree.ancestors("l8", of="root")]

    compiled = torch.compile(deep, fullgraph=True, backend=compile_counter)
    assert torch.equal(compiled(tree, torch.tensor([5.0])), torch.full((512,), 5.0))


class Model(torch.nn.Module):
    def forward(self, tree, x):
        return gathered(tree, x)


@pytest.mark.parametrize("padded", [False, True])
def test_export_save_load(padded):
    """An exported model takes other trees, by sizes and live counts."""
    rng = np.random.default_rng(2)
    capacity = {"user": 16, "vendor": 64, "item": 512} if padded else None
    tree = random_tree(rng, capacity=capacity, tables=True)
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    dims = [{0: Dim.DYNAMIC} if leaf.shape[0] > 3 else None for leaf in leaves]
    x = torch.randn(tree.capacity("user"), 3)
    exported = torch.export.export(
        Model(), (tree, x), strict=False, dynamic_shapes=(dims, {0: Dim.DYNAMIC})
    )
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for _ in range(5):
        other = random_tree(rng, capacity=capacity, tables=True)
        x = torch.randn(other.capacity("user"), 3)
        assert torch.equal(loaded(other, x), gathered(other, x))


def test_a_tree_rebuilt_from_its_tensors_is_the_tree():
    rng = np.random.default_rng(3)
    for capacity in (None, {"user": 16, "vendor": 64, "item": 512}):
        tree = random_tree(rng, capacity=capacity, tables=True)
        again = torch.utils._pytree.tree_map(torch.clone, tree)
        assert again == tree
        assert [again.rows(n) for n in again.levels] == [tree.rows(n) for n in tree.levels]
        assert again.rows("brand") == 3
        assert again.select(user=[1]) == tree.select(user=[1])


def test_threads_build_trees_at_once():
    """The first one compiles; all wait for it or use it, none aborts."""
    wrong = []

    def build(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            tree = random_tree(rng)
            vendor = tree.parents("vendor").long()
            if not torch.equal(
                tree.ancestors("item", of="user").long(), vendor[tree.parents("item").long()]
            ):
                wrong.append(seed)

    threads = [threading.Thread(target=build, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


COLD_THREADS = """
import threading, sys
sys.setswitchinterval(1e-6)
from ikbo_tree import BroadcastTree
done = []
def build():
    tree = BroadcastTree.from_parents({"item": [1, 0, 1]}, root="user", root_rows=2)
    done.append(tree.order("item", of="user").tolist())
threads = [threading.Thread(target=build) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert done == [[1, 0, 2]] * 8, done
print("ok")
"""


@pytest.mark.slow
def test_eight_threads_race_for_the_first_compilation(tmp_path):
    """An empty Numba cache, so that every thread finds nothing compiled."""
    import os

    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", COLD_THREADS], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == "ok", done.stderr


FIRST_CALL = """
import torch
from ikbo_tree import BroadcastTree
tree = BroadcastTree.from_counts({"item": [2, 3]}, root="user")
f = torch.compile(lambda t, x: x[t.parents("item")], fullgraph=True, backend="aot_eager")
print(f(tree, torch.tensor([1.0, 2.0])).tolist())
"""


@pytest.mark.slow
def test_first_call_of_a_process_under_fullgraph(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[1.0, 1.0, 2.0, 2.0, 2.0]", done.stderr
