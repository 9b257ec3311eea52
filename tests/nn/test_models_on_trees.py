"""Whole models of docs/examples on trees, against the flat models of the zoo."""

import contextlib
import functools
import io
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from flat_twins import compiled_once
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models.bst import BST
from models.dlrm import DLRM
from models.sizes import TINY
from models.zoo import ZOO

from ikbo_tree import BroadcastTree
from ikbo_tree.testing import check_model, with_capacity
from ikbo_tree.testing.strategies import trees

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
uneven = trees(max_depth=3, branching=False, tables=False, capacity=False, max_rows=60)


@functools.cache
def example(name):
    """What the first block of a page defines, as a module: torch.compile looks for one."""
    code = re.search(r"```python\n(.*?)```", (EXAMPLES / f"{name}.md").read_text(), re.S)[1]
    module = types.ModuleType(f"example_{name}")
    sys.modules[module.__name__] = module
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, f"{name}.md", "exec"), vars(module))
    return module


class FlatBST(BST):
    """With lengths for the padding."""

    def forward(self, user_x, history_ids, history_lengths, item_x, item_ids):
        padding = torch.arange(history_ids.shape[1]) >= history_lengths.unsqueeze(1)
        return super().forward(user_x, history_ids, padding, item_x, item_ids)


class FlatDLRM(DLRM):
    """With the pairs in the order of the tree's fields: the user's, then the item's."""

    def __init__(self, sizes):
        super().__init__(sizes)
        user_ids = [3 + i for i in range(sizes.fields)]
        item_ids = [3 + sizes.fields + i for i in range(sizes.fields)]
        order = torch.tensor([0, 2, *user_ids, 1, *item_ids])
        self.rows, self.columns = order[self.rows], order[self.columns]


def sizes_of(name):
    s = TINY[name]
    common = {"dense": s.dense, "vocabulary": s.vocabulary, "width": s.width}
    if name == "dlrm":
        return {**common, "fields": s.fields, "inner": s.inner, "hidden": s.hidden}
    return {
        **common, "history": s.history, "heads": s.heads, "layers": s.layers,
        "inner": s.inner[0], "hidden": s.hidden[0],
    }  # fmt: skip


FLAT = {"dlrm": FlatDLRM, "bst": FlatBST}
MODELS = {"dlrm": "TreeDLRM", "bst": "TreeBST"}
every_model = pytest.mark.parametrize("name", MODELS)


def twins(name, seed=0):
    """The flat model as the zoo initialises it, and the page's with its parameters."""
    torch.manual_seed(seed)
    flat = ZOO[name].build(TINY[name])
    flat_twin = FLAT[name](TINY[name]).eval()
    flat_twin.load_state_dict(flat.state_dict())
    fast = getattr(example(name), MODELS[name])(**sizes_of(name)).eval()
    fast.load_state_dict(flat.state_dict())
    return flat_twin, fast


def inputs_of(name, tree, seed=0):
    found = ZOO[name].compact_inputs(TINY[name], tree, seed)
    if "history_padding" in found:
        generator = torch.Generator().manual_seed(seed)
        padding = found.pop("history_padding")
        # Over one event a softmax has gradients of rounding alone.
        lengths = torch.randint(2, padding.shape[1] + 1, (len(padding),), generator=generator)
        found["history_lengths"] = lengths
    return found


def levels_of(inputs):
    return {name: "item" if name.startswith("item") else "user" for name in inputs}


def padded(x, rows):
    """With nonsense in rows that do not count."""
    out = torch.full((rows, *x.shape[1:]), torch.nan if x.is_floating_point() else 99).to(x.dtype)
    out[: len(x)] = x
    return out


@every_model
@settings(max_examples=15)
@given(tree=uneven, seed=st.integers(0, 2**16))
def test_equals_the_flat_model(name, tree, seed):
    # torch's own attention takes no empty batch.
    assume("item" in tree.levels and tree.rows("item"))
    flat, fast = twins(name, seed)
    inputs = inputs_of(name, tree, seed)
    report = check_model(flat, fast, tree, inputs, levels=levels_of(inputs), seed=seed)
    assert report.outputs
    assert report.parameters.keys() == dict(fast.named_parameters()).keys()


@every_model
def test_state_dicts_are_the_zoo_s(name):
    _, fast = twins(name)
    flat = ZOO[name].build(TINY[name])
    assert list(fast.state_dict()) == list(flat.state_dict())


@every_model
def test_users_without_items_or_history_and_rows_that_do_not_count(name):
    tree = BroadcastTree.from_counts({"item": [3, 0, 2]}, root="user")
    _, fast = twins(name)
    inputs = inputs_of(name, tree)
    if name == "bst":
        inputs["history_lengths"] = torch.tensor([0, 3, 5])
    exact = fast(**inputs, tree=tree)
    assert exact.isfinite().all()
    spare = with_capacity(tree, {"user": 2, "item": 3})
    spread = {key: padded(x, spare.capacity(levels_of(inputs)[key])) for key, x in inputs.items()}
    out = fast(**spread, tree=spare)
    torch.testing.assert_close(out[:5], exact)
    assert (out[5:] == 0).all()
    wanted = list(fast.parameters())
    grads = torch.autograd.grad(out.square().sum(), wanted)
    torch.testing.assert_close(
        grads, torch.autograd.grad(exact.square().sum(), wanted), rtol=1e-4, atol=1e-5
    )


@every_model
def test_no_items_at_all(name):
    tree = BroadcastTree.from_counts({"item": [0, 0]}, root="user")
    _, fast = twins(name)
    out = fast(**inputs_of(name, tree), tree=tree)
    assert out.shape == (0, 1)
    out.sum().backward()
    assert all((p.grad == 0).all() for p in fast.parameters())


@every_model
def test_new_trees_do_not_recompile(name):
    _, fast = twins(name)
    keys = list(inputs_of(name, BroadcastTree.from_counts({"item": [1]}, root="user")))

    def score(*args):
        return fast(**dict(zip(keys, args, strict=False)), tree=args[-1])

    for compiled, rng in compiled_once(score):
        counts = rng.integers(1, 9, int(rng.integers(3, 9)))
        tree = BroadcastTree.from_counts({"item": counts}, root="user")
        args = [*inputs_of(name, tree).values(), tree]
        torch.testing.assert_close(compiled(*args), score(*args), rtol=1e-4, atol=1e-5)
