"""Each rule of the row-wise table, broken on purpose: a micro-model must show it.

`misplaced` says that the result's rows are in the next dim. `careless` says that rows stay where
they are whenever the rule says that they may mix. A broken rule is noticed if the rewrite raises,
as its check does where values differ, or its result differs.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from rewrite_cases import all_cases
from rewrite_cases.trees import EXAMPLE

import ikbo_tree as ikbo
from ikbo_tree.rewriting import graph_pass  # noqa: F401  registers all rules
from ikbo_tree.rewriting.rowwise import RULES, Rows

pytestmark = pytest.mark.slow

MISPLACED = {
    "along": "reductions.scatter_add_in_row",
    "along_another_dim": "reductions.softmax",
    "attention": "attention.sdpa_self",
    "batched": "matmuls.bmm_same",
    "between_sorted": "embeddings.searchsorted",
    "channels": "reductions.batch_norm_eval",
    "convolved": "reductions.conv1d",
    "cosine": "reductions.cosine_of_tokens",
    "diagonal": "reductions.diagonal",
    "einsum": "matmuls.einsum_weights_0",
    "elementwise": "elementwise.relu",
    "embedding": "embeddings.embedding",
    "expanded": "views.expand",
    "groups": "reductions.group_norm",
    "indexed": "embeddings.weight_by_index",
    "like_another": "elementwise.type_as",
    "linear": "matmuls.linear",
    "matmul": "matmuls.matmul_4d_weights",
    "normalised": "reductions.layer_norm",
    "of_other_dims": "reductions.flip",
    "of_the_first": "elementwise.prelu",
    "padded": "reductions.pad",
    "part_of_another_dim": "views.narrow",
    "permuted": "views.permute",
    "reduction": "reductions.sum_keepdim",
    "repeated": "views.repeat_columns",
    "repeated_within": "views.repeat_interleave_columns",
    "reshaped": "views.view_split",
    "tiled": "views.tile",
    "triangles": "reductions.tril",
    "two_matrices": "matmuls.addmm",
    "unfold": "views.unfold",
    "unsqueeze": "views.unsqueeze",
    "without_a_dim": "views.select",
    "written": "traps.column_write",
}
"""A micro-model that shows each rule's place of rows."""

CARELESS = {
    "along": "mixing.gather_over_rows",
    "along_another_dim": "views.softmax_over_merged",
    "attention": "attention.sdpa_keys_of_item",
    "batched": "matmuls.bmm_across",
    "cosine": "mixing.cosine_of_columns",
    "diagonal": "mixing.diagonal_of_rows",
    "einsum": "matmuls.einsum_across",
    "elementwise": "elementwise.add_alpha",
    "embedding": "mixing.embedding_of_rows",
    "indexed": "mixing.permuted",
    "linear": "mixing.linear_by_rows",
    "matmul": "matmuls.matmul_across",
    "normalised": "mixing.layer_norm_of_batch",
    "of_other_dims": "mixing.roll_flat",
    "padded": "mixing.pad_rows",
    "part_of_another_dim": "mixing.first_row_kept",
    "reduction": "reductions.sum_of_rows",
    "repeated": "mixing.repeated_rows",
    "reshaped": "concatenations.reshaped",
    "tiled": "mixing.tiled_rows",
    "triangles": "mixing.tril_of_rows",
    "two_matrices": "matmuls.addmm_onto_items",
    "without_a_dim": "mixing.first_row",
    "written": "traps.row_write",
}
"""A micro-model in which each rule must say no."""

NEVER = {
    "expanded", "like_another", "permuted", "unsqueeze",
}  # fmt: skip
"""Rules that say no to nothing that a model can ask with one operand on coarse rows."""

UNTRIED = {
    "between_sorted", "channels", "convolved", "groups", "of_the_first", "repeated_within",
    "unfold",
}  # fmt: skip
"""Rules whose no would take parameters with a number for each row, or windows of rows."""

CASES = {case.name: case for case in all_cases()}


def misplaced(rule):
    def broken(call):
        rows = rule(call)
        if rows is None:
            return None
        many = isinstance(rows.dim, tuple)
        outs = call.out if isinstance(call.out, (tuple, list)) else [call.out]
        dims = rows.dim if many else (rows.dim,) * len(outs)
        pairs = zip(dims, outs, strict=True)
        moved = tuple(None if d is None else (d + 1) % out.dim() for d, out in pairs)
        return replace(rows, dim=moved if many else moved[0])

    return broken


def careless(rule):
    def broken(call):
        rows = rule(call)
        if rows is not None or not call.operands():
            return rows
        x = call.operands()[0]
        if isinstance(call.out, torch.Tensor):
            return Rows(min(x.dim, max(0, call.out.dim() - 1)), x.merged)
        return Rows(tuple(min(x.dim, max(0, out.dim() - 1)) for out in call.out), x.merged)

    return broken


NOTICED = (AssertionError, RuntimeError, IndexError, ValueError, TypeError)


def rewrite(name):
    """Rewritten, checked and run."""
    case = CASES[name]
    tree = EXAMPLE.tree(case.depth)
    own = {n: x.double() if x.is_floating_point() else x for n, x in case.inputs(tree, 0).items()}
    model, flat = case.module().double(), case.flat(own, tree)
    fast, _ = ikbo.rewrite(
        model,
        flat,
        levels=case.levels,
        broadcasts=case.broadcasts,
        counts=case.counts,
        compact=case.compact,
        profit=False,
        # Random row numbers, which are no map, would not fit random trees.
        check_seconds=0 if "perm" in flat else 0.01,
    )
    found = fast(**own, tree=tree) if case.compact else fast(**own)
    torch.testing.assert_close(found, model(**flat), rtol=1e-9, atol=1e-9)


def broken(name, change):
    return {op: change(rule) for op, rule in RULES.items() if rule.__name__ == name}


def test_every_rule_has_a_model():
    names = {rule.__name__ for rule in RULES.values()}
    assert set(MISPLACED) == names
    assert set(CARELESS) | NEVER | UNTRIED == names
    assert not set(CARELESS) & (NEVER | UNTRIED)


@pytest.mark.parametrize("name", MISPLACED)
def test_rows_in_another_dim_are_noticed(name):
    with mock.patch.dict(RULES, broken(name, misplaced)), pytest.raises(NOTICED):
        rewrite(MISPLACED[name])


@pytest.mark.parametrize("name", CARELESS)
def test_rows_that_mix_are_noticed(name):
    with mock.patch.dict(RULES, broken(name, careless)), pytest.raises(NOTICED):
        rewrite(CARELESS[name])


@pytest.mark.parametrize("name", sorted({*MISPLACED.values(), *CARELESS.values()}))
def test_unbroken_rules_raise_nothing(name):
    rewrite(name)
