"""Refusals: a complete sentence with the model's line, for every kind of model to refuse."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, UnsupportedError

LEVELS = {"user_x": "user", "item_x": "item"}
MAPS = {"item_to_user": ("item", "user")}


class Squeezed(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return item_x + user_x[item_to_user].unsqueeze(0).squeeze()


class DroppedOut(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        user = user_x[item_to_user]
        return item_x + F.dropout(user, 0.5)


class Noisy(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return user_x[item_to_user] + torch.randn_like(item_x)


class Drawn(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        chosen = torch.multinomial(user_x.softmax(0)[:, 0], 1)
        return item_x + user_x[chosen]


class NormalisedByBatch(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return item_x + F.batch_norm(user_x[item_to_user], None, None, training=True)


class Nonzero(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return item_x + user_x[item_to_user].nonzero().sum()


class ChosenRows(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        user = user_x[item_to_user]
        return item_x.sum(0) + user[item_x[:, 0] > 0].sum(0)


class Distinct(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return item_x + user_x[item_to_user].unique().sum()


class ReadAsNumber(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return user_x[item_to_user] * item_x.sum().item()


class WritingToAnInput(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        item_x.add_(1)
        return user_x[item_to_user] + item_x


class WritingToABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, user_x, item_x, item_to_user):
        self.calls += 1
        return user_x[item_to_user] + item_x


class Branching(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        user = user_x[item_to_user]
        return user + item_x if bool(user.sum() > 0) else user - item_x


class SlicedByValue(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return user_x[item_to_user][:, : int(item_x.abs().max())].sum(1)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, user_x, item_x, item_to_user):
        return self.norm(user_x[item_to_user]) + item_x


class NormalisedTwo(Normalised):
    def forward(self, user_x, item_x):
        return self.norm(user_x) + item_x


class Centred(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return user_x[item_to_user] + item_x - item_x.mean(0)


class Divided(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return user_x[item_to_user] + item_x / item_x.shape[0]


class Tangled(nn.Module):
    def forward(self, user_x, item_x, item_to_user):
        return torch.cat([user_x[item_to_user], item_x[:, :3]], 0)


SENTENCES = {
    Squeezed: ("aten.squeeze drops the rows' own dim where there is one row", "squeeze()"),
    DroppedOut: (r"aten.\w*dropout draws random numbers, whose order", "F.dropout("),
    Noisy: ("aten.randn_like draws random numbers, whose order", "torch.randn_like("),
    Drawn: ("aten.multinomial draws random numbers, whose order", "torch.multinomial("),
    NormalisedByBatch: (
        r"aten.\w*batch_norm\w* takes statistics of the batch, which mixes its rows",
        "training=True",
    ),
    Nonzero: ("aten.nonzero gives a tensor whose size depends on values", "nonzero()"),
    ChosenRows: (r"aten.\w+ gives a tensor whose size depends on values", "> 0].sum(0)"),
    Distinct: (r"aten.\w*unique\w* gives a tensor whose size depends on values", "unique()"),
    ReadAsNumber: ("aten.item makes a number of a tensor's values", "item()"),
    WritingToAnInput: ("it writes to its input 'item_x' in place, in an order", "add_(1)"),
    WritingToABuffer: ("it writes to its buffer 'calls' in place, in an order", "calls += 1"),
    Branching: ("a size or a branch of it depends on a tensor's values", "if bool("),
    SlicedByValue: ("a size or a branch of it depends on a tensor's values", "int("),
    Tangled: ("torch.export makes no graph of it, for RuntimeError: .*", "torch.cat("),
}
"""How each sentence begins, and the code that it quotes."""


def rewrite(model):
    inputs = torch.randn(3, 4), torch.randn(7, 4), torch.arange(7) % 3
    return ikbo.rewrite(model, inputs, levels=LEVELS, broadcasts=MAPS, check_seconds=0)


def line_of(model, code):
    """Where the code is in the model's `forward`, as Python counts."""
    lines, first = inspect.getsourcelines(model.forward)
    return first + next(i for i, line in enumerate(lines) if code in line)


def where(model, code):
    """The end of a sentence."""
    place = rf'"[^"]*test_refusals\.py", line {line_of(model, code)}, in forward'
    return rf" \({place}: `.*{re.escape(code)}.*`\)"


@pytest.mark.parametrize("model", SENTENCES, ids=lambda model: model.__name__)
def test_refusals_are_sentences_with_the_model_s_line(model):
    begin, code = SENTENCES[model]
    with pytest.raises(UnsupportedError) as caught:
        rewrite(model().eval())
    message = str(caught.value)
    sentence = rf"the model cannot be rewritten: {begin}[^\n]*{where(model, code)}"
    assert re.fullmatch(sentence, message), message


@pytest.mark.parametrize("compact", [False, True], ids=["maps", "compact"])
def test_training_mode_is_refused_and_left_as_it_is(compact):
    """It names the module, if it is not all of the model."""
    inputs = [torch.randn(7, 4), torch.randn(7, 4)]
    given = {"levels": {"user_x": "item", "item_x": "item"}, "compact": {"user_x": "user"}}
    if not compact:
        inputs = [torch.randn(3, 4), torch.randn(7, 4), torch.arange(7) % 3]
        given = {"levels": LEVELS, "broadcasts": MAPS}
    made = NormalisedTwo if compact else Normalised
    whole, part = made().train(), made().eval()
    part.norm.train()
    for model, name in ((whole, "the model"), (part, "its module 'norm' (BatchNorm1d)")):
        with pytest.raises(UnsupportedError) as caught:
            ikbo.rewrite(model, tuple(inputs), **given)
        expected = f"the model cannot be rewritten: {name} is in training mode"
        assert str(caught.value) == f"{expected}; call model.eval() first"
    assert whole.training
    assert part.norm.training


@pytest.mark.parametrize(
    ("model", "why", "code"),
    [
        (Centred, "aten.mean may mix rows of level 'item'", "mean(0)"),
        (Divided, "aten.div calculates with the number of rows of level 'item'", "/ item_x"),
    ],
)
def test_rows_taken_together_are_refused_where_some_are_spare(model, why, code):
    """And only there: otherwise such models are rewritten, and right."""
    tree = BroadcastTree.from_counts({"item": [3, 1, 3]}, root="user")
    padded = BroadcastTree.from_counts({"item": [3, 1, 3]}, root="user", capacity={"item": 9})
    inputs = torch.randn(3, 4), torch.randn(7, 4), tree.ancestors("item", of="user")
    fast, _ = ikbo.rewrite(model().eval(), inputs, levels=LEVELS, broadcasts=MAPS, tree=tree)
    torch.testing.assert_close(fast(*inputs[:2], tree=tree), model()(*inputs))
    with pytest.raises(UnsupportedError) as caught:
        ikbo.rewrite(model().eval(), inputs, levels=LEVELS, broadcasts=MAPS, tree=padded)
    begin = f"the model cannot be rewritten: {why}, and a tree with capacity has rows that must not"
    message = str(caught.value)
    assert re.fullmatch(rf"{re.escape(begin)} count{where(model, code)}", message), message
