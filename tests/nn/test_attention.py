"""The attention modules: packed histories, several queries a row, tables, what they refuse."""

import pytest
import torch
from torch import nn

from ikbo_tree import BroadcastTree, TreeError
from ikbo_tree.nn import HSTULayer, TreeHSTU, TreeTargetAttention, TreeTransformerBlock

TREE = BroadcastTree.from_counts({"item": [2, 0, 3]}, root="user")
LENGTHS = torch.tensor([4, 2, 0])
OFFSETS = torch.tensor([1, 5, 7, 7], dtype=torch.int32)
WIDTH = 8


def histories():
    """The same events padded and packed, NaN where no one owns any."""
    padded = torch.full((3, 5, WIDTH), torch.nan)
    packed = torch.full((9, WIDTH), torch.nan)
    for user, length in enumerate(LENGTHS.tolist()):
        events = torch.randn(length, WIDTH)
        padded[user, :length] = events
        packed[int(OFFSETS[user]) : int(OFFSETS[user + 1])] = events
    return padded, packed


def blocks():
    where = {"of": "user", "level": "item"}
    return TreeTransformerBlock(WIDTH, 2, 12, **where), TreeHSTU(WIDTH, 2, 5, **where)


def test_packed_histories_are_padded_ones():
    padded, packed = histories()
    query = torch.randn(5, WIDTH)
    attention = TreeTargetAttention(WIDTH, 2, level="item")
    ours = attention(query, {"user": packed}, tree=TREE, offsets={"user": OFFSETS})
    sure = attention(query, {"user": padded}, tree=TREE, lengths={"user": LENGTHS})
    torch.testing.assert_close(ours, sure)
    block, _ = blocks()
    ours = block({"user": packed, "item": query}, tree=TREE, offsets=OFFSETS)
    sure = block({"user": padded, "item": query}, tree=TREE, lengths=LENGTHS)
    torch.testing.assert_close(ours["item"], sure["item"])
    for user, length in enumerate(LENGTHS.tolist()):
        part = ours["user"][int(OFFSETS[user]) : int(OFFSETS[user + 1])]
        torch.testing.assert_close(part, sure["user"][user, :length])
    assert (ours["user"][[0, 7, 8]] == 0).all()
    sum(x.sum() for x in ours.values()).backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_several_queries_a_row_do_not_see_each_other():
    padded, _ = histories()
    query = torch.randn(5, 3, WIDTH)
    attention = TreeTargetAttention(WIDTH, 2, level="item")
    where = {"tree": TREE, "lengths": {"user": LENGTHS}}
    together = attention(query, {"user": padded}, **where)
    for i in range(3):
        torch.testing.assert_close(
            together[:, i], attention(query[:, i], {"user": padded}, **where)
        )
    for block in blocks():
        where = {"tree": TREE, "lengths": LENGTHS}
        together = block({"user": padded, "item": query}, **where)["item"]
        for i in range(3):
            alone = block({"user": padded, "item": query[:, i]}, **where)["item"]
            torch.testing.assert_close(together[:, i], alone)


def test_nothing_to_attend_to_gives_the_bias():
    attention = TreeTargetAttention(WIDTH, 2, level="item")
    torch.nn.init.normal_(attention.out_proj.bias)
    padded, _ = histories()
    found = attention(torch.randn(5, WIDTH), {"user": padded}, tree=TREE, lengths={"user": LENGTHS})
    assert torch.equal(found[2:], attention.out_proj.bias.expand(3, WIDTH))


def test_histories_of_a_table():
    tree = TREE.with_table("brand", of="item", index=[1, 0, 1, 1, 0], rows=2)
    attention = TreeTargetAttention(WIDTH, 2, level="item", bias=False)
    query, events = torch.randn(5, WIDTH), torch.randn(2, 3, WIDTH)
    copied = events[torch.tensor([1, 0, 1, 1, 0])]
    sure = attention.to_flat()(query.unsqueeze(1), copied, copied, need_weights=False)[0]
    torch.testing.assert_close(attention(query, {"brand": events}, tree=tree), sure.squeeze(1))


def test_keys_and_values_are_projected_once_a_history():
    tree = BroadcastTree.from_counts({"item": [64] * 4}, root="user")
    attention = TreeTargetAttention(WIDTH, 2, level="item")
    sizes = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
                sizes.append(tuple(out.shape))
            return out

    with Watched():
        attention(torch.randn(256, WIDTH), {"user": torch.randn(4, 5, WIDTH)}, tree=tree)
    assert (4 * 5, 2 * WIDTH) in sizes
    assert all(rows <= 256 for rows, _ in sizes)


def test_errors_are_in_the_callers_words():
    attention = TreeTargetAttention(WIDTH, 2, level="item")
    padded, packed = histories()
    query = torch.randn(5, WIDTH)
    with pytest.raises(TreeError, match=r"query must have shape \[rows, 8\]"):
        attention(query[:, :4], {"user": padded}, tree=TREE)
    with pytest.raises(TreeError, match=r'histories\["user"\] must have shape \[rows, S, E\]'):
        attention(query, {"user": packed}, tree=TREE)
    with pytest.raises(TreeError, match=r"lengths must name histories: \['user'\]"):
        attention(query, {"user": padded}, tree=TREE, lengths={"shop": LENGTHS})
    with pytest.raises(TreeError, match=r'lengths\["user"\] must lie in 0 ... 5'):
        attention(query, {"user": padded}, tree=TREE, lengths={"user": LENGTHS + 2})
    with pytest.raises(TreeError, match=r'histories\["user"\] must have 3 rows'):
        attention(query, {"user": padded[:2]}, tree=TREE)
    for block in blocks():
        with pytest.raises(TreeError, match=r"inputs must have the names \['user', 'item'\]"):
            block({"user": padded}, tree=TREE)
    with pytest.raises(TreeError, match=r'inputs\["user"\] must hold at most 5 events'):
        blocks()[1]({"user": torch.randn(3, 6, WIDTH), "item": query}, tree=TREE)


def test_flat_modules_that_have_no_equivalent():
    with pytest.raises(ValueError, match=r"flat must have no dropout; got 0.1"):
        TreeTargetAttention.from_flat(nn.MultiheadAttention(8, 2, dropout=0.1), level="item")
    with pytest.raises(ValueError, match="keys and values as wide as its queries"):
        TreeTargetAttention.from_flat(nn.MultiheadAttention(8, 2, kdim=4), level="item")
    with pytest.raises(ValueError, match="no keys of its own"):
        TreeTargetAttention.from_flat(nn.MultiheadAttention(8, 2, add_zero_attn=True), level="item")
    where = {"of": "user", "level": "item"}
    with pytest.raises(ValueError, match="flat must have no dropout"):
        TreeTransformerBlock.from_flat(nn.TransformerEncoderLayer(8, 2, 12), **where)
    with pytest.raises(ValueError, match="of and level must differ; got 'item' for both"):
        TreeTransformerBlock(8, 2, 12, of="item", level="item")
    with pytest.raises(ValueError, match="num_heads must divide embed_dim"):
        HSTULayer(8, 3, 5)
