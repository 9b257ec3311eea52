"""Every module of `ikbo_tree.nn` beside its flat equivalent, on inputs that fit both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from ikbo_tree import BroadcastTree
from ikbo_tree.nn import (
    HSTULayer,
    TreeCrossNet,
    TreeDotInteraction,
    TreeHSTU,
    TreeLinear,
    TreeLinearCompression,
    TreeMLP,
    TreeTargetAttention,
    TreeTransformerBlock,
)
from ikbo_tree.testing import check_model

WIDTHS = {"user": 5, "vendor": 3, "item": 4}
WIDTH, HEADS, EVENTS = 8, 2, 5


def some_tree(seed=0, users=3, **options):
    rng = np.random.default_rng(seed)
    vendors = rng.integers(1, 3, users)
    items = rng.integers(1, 4, vendors.sum())
    return BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user", **options)


class Flat(nn.Module):
    """A flat module as `check_model` calls it."""

    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, **inputs):
        return self.call(self.module, inputs)


class OnTree(Flat):
    """A module of the library, likewise."""

    def forward(self, tree, **inputs):
        return self.call(self.module, inputs, tree)


@dataclass(frozen=True)
class Twins:
    """A flat module and the one on a tree.

    Attributes:
        flat: makes the flat one.
        of: makes the other from it.
        shapes: of a row of each input.
        call: `(module, inputs, tree)` -> outputs.
        flat_call: `(flat, inputs at the items)` -> outputs.
        levels: of each input; default its name.
        outputs: levels of the outputs.
    """

    flat: Callable[[], nn.Module]
    of: Callable[[nn.Module], nn.Module]
    shapes: dict[str, tuple[int, ...]]
    call: Callable
    flat_call: Callable
    levels: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("item",)

    def level(self, name):
        return self.levels.get(name, name)

    def make(self, seed=0):
        torch.manual_seed(seed)
        return self.of(self.flat())

    def inputs(self, tree, seed=0, least=2):
        """Lengths of at least `least`; over one event a softmax has gradients of rounding alone."""
        generator = torch.Generator().manual_seed(seed)
        found = {}
        for name, shape in self.shapes.items():
            size = (tree.capacity(self.level(name)), *shape)
            if name.startswith("lengths"):
                found[name] = torch.randint(least, EVENTS + 1, size, generator=generator)
            else:
                found[name] = torch.randn(size, generator=generator)
        return found

    def check(self, tree, seed=0):
        flat = self.flat()
        check_model(
            Flat(flat, self.flat_call),
            OnTree(self.of(flat), self.call),
            tree,
            self.inputs(tree, seed),
            levels={name: self.level(name) for name in self.shapes},
            to="item",
            output_levels=self.outputs,
        )


def side_by_side(flat, x):
    return flat(torch.cat(list(x.values()), dim=1))


def as_mapping(module, x, tree):
    return module(x, tree=tree)


def mlp(*widths):
    layers = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def compressed(flat, x):
    return flat.weight @ torch.cat(list(x.values()), dim=1)


def crossed(flat, x):
    x0 = x = torch.cat(list(x.values()), dim=1)
    for layer in flat:
        x = x0 * layer(x) + x
    return x


def low_rank():
    total = sum(WIDTHS.values())
    pair = [nn.Linear(total, 2, bias=False), nn.Linear(2, total)]
    return nn.ModuleList([nn.Sequential(*pair)])


def dotted(flat, x):
    fields = torch.cat(list(x.values()), dim=1)
    i, j = torch.tril_indices(fields.shape[1], fields.shape[1], -1)
    return torch.bmm(fields, fields.transpose(1, 2))[:, i, j]


def beyond(lengths, size=EVENTS):
    return torch.arange(size) >= lengths.unsqueeze(1)


def attended(flat, x):
    """One softmax over what both levels have."""
    events = torch.cat([x["user"], x["vendor"]], dim=1)
    padding = torch.cat([beyond(x["lengths"]), beyond(torch.full(x["lengths"].shape, EVENTS))], 1)
    query = x["item"].unsqueeze(1)
    found, _ = flat(query, events, events, key_padding_mask=padding, need_weights=False)
    return found.squeeze(1)


def attended_on_tree(module, x, tree):
    histories = {"user": x["user"], "vendor": x["vendor"]}
    return module(x["item"], histories, tree=tree, lengths={"user": x["lengths"]})


def transformed(causal):
    """The candidate as last position, which nobody sees."""
    hidden = torch.zeros(EVENTS + 1, EVENTS + 1, dtype=torch.bool)
    hidden[:, EVENTS] = True
    if causal:
        hidden[:EVENTS] |= torch.ones(EVENTS, EVENTS + 1, dtype=torch.bool).triu(1)

    def call(flat, x):
        sequence = torch.cat([x["user"], x["item"].unsqueeze(1)], dim=1)
        padding = torch.cat([beyond(x["lengths"]), torch.zeros(len(sequence), 1).bool()], dim=1)
        found = flat(sequence, src_mask=hidden, src_key_padding_mask=padding)
        history = found[:, :EVENTS].masked_fill(beyond(x["lengths"]).unsqueeze(2), 0)
        return history, found[:, EVENTS]

    return call


def block_on_tree(module, x, tree):
    found = module({n: x[n] for n in ("user", "item")}, tree=tree, lengths=x["lengths"])
    return found["user"], found["item"]


def hstu(flat, x):
    history, candidate = flat(x["user"], x["item"], x["lengths"])
    return history.masked_fill(beyond(x["lengths"]).unsqueeze(2), 0), candidate


def encoder_layer(norm_first):
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 12, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu"
    )


FEATURES = {name: (width,) for name, width in WIDTHS.items()}
FIELDS = {name: (width, 6) for name, width in WIDTHS.items()}
SEQUENCES = {"user": (EVENTS, WIDTH), "lengths": (), "item": (WIDTH,)}
TOTAL = sum(WIDTHS.values())
OF_USER = {"lengths": "user"}

TWINS = {
    "linear": Twins(
        lambda: nn.Linear(TOTAL, 6),
        lambda flat: TreeLinear.from_flat(flat, WIDTHS),
        FEATURES, as_mapping, side_by_side,
    ),
    "mlp": Twins(
        lambda: mlp(TOTAL, 7, 6, 2),
        lambda flat: TreeMLP.from_flat(flat, WIDTHS),
        FEATURES, as_mapping, side_by_side,
    ),
    "linear_compression": Twins(
        lambda: nn.Linear(TOTAL, 6, bias=False),
        lambda flat: TreeLinearCompression.from_flat(flat, WIDTHS),
        FIELDS, as_mapping, compressed,
    ),
    "cross_net": Twins(
        lambda: nn.ModuleList([nn.Linear(TOTAL, TOTAL), nn.Linear(TOTAL, TOTAL, bias=False)]),
        lambda flat: TreeCrossNet.from_flat(flat, WIDTHS),
        FEATURES, as_mapping, crossed,
    ),
    "low_rank_cross_net": Twins(
        low_rank, lambda flat: TreeCrossNet.from_flat(flat, WIDTHS), FEATURES, as_mapping, crossed
    ),
    "dot_interaction": Twins(
        nn.Identity, lambda flat: TreeDotInteraction(), FIELDS, as_mapping, dotted
    ),
    "target_attention": Twins(
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        lambda flat: TreeTargetAttention.from_flat(flat, level="item"),
        {"user": (EVENTS, WIDTH), "vendor": (EVENTS, WIDTH), "lengths": (), "item": (WIDTH,)},
        attended_on_tree, attended, OF_USER,
    ),
    "transformer_block": Twins(
        lambda: encoder_layer(norm_first=False),
        lambda flat: TreeTransformerBlock.from_flat(flat, of="user", level="item"),
        SEQUENCES, block_on_tree, transformed(causal=False), OF_USER, ("user", "item"),
    ),
    "causal_transformer_block": Twins(
        lambda: encoder_layer(norm_first=True),
        lambda flat: TreeTransformerBlock.from_flat(flat, of="user", level="item", causal=True),
        SEQUENCES, block_on_tree, transformed(causal=True), OF_USER, ("user", "item"),
    ),
    "hstu": Twins(
        lambda: HSTULayer(WIDTH, HEADS, EVENTS),
        lambda flat: TreeHSTU.from_flat(flat, of="user", level="item"),
        SEQUENCES, block_on_tree, hstu, OF_USER, ("user", "item"),
    ),
}  # fmt: skip
"""By name."""
