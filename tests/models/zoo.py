"""The registry of the model zoo: what each model takes, and random inputs for any tree.

    entry = ZOO["din"]
    model = entry.build(TINY["din"])
    logits = model(**entry.inputs(TINY["din"], tree, seed=0))  # [items, tasks]

For a model that takes its inputs already broadcast to the items, `compact_inputs` are the same
values at their own levels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ikbo_tree import BroadcastTree
from models.ads import ThreeLevelAds
from models.bst import BST
from models.dcn_v2 import DCNv2
from models.din import DIN
from models.dlrm import DLRM
from models.hstu import HSTU
from models.phoenix import Phoenix
from models.sizes import Sizes
from models.two_tower import TwoTower
from models.wukong import Wukong


@dataclass(frozen=True)
class Input:
    """One input of a model.

    Attributes:
        kind: "floats", "ids" below the vocabulary, "mask" (true: an event is there), "padding"
            (true: none is), "lengths" (real events), "map" or "counts".
        level: whose rows it has; a map's is the finer level, that of counts the coarser one.
        dims: of one row, by their names in `Sizes`.
        other: the coarser level of a map, the finer one of counts.
    """

    kind: str
    level: str
    dims: tuple[str, ...] = ()
    other: str = ""

    def draw(self, sizes: Sizes, tree: BroadcastTree, random: torch.Generator) -> Tensor:
        """Values at the input's own level: float64, int64 or bool.

        Every history has at least one event, since attention over nothing is NaN.
        """
        shape = (tree.rows(self.level), *(getattr(sizes, dim) for dim in self.dims))
        match self.kind:
            case "floats":
                return torch.randn(shape, generator=random, dtype=torch.float64)
            case "ids":
                return torch.randint(sizes.vocabulary, shape, generator=random)
            case "lengths":
                return torch.randint(1, sizes.history + 1, shape, generator=random)
            case "mask" | "padding":
                mask = torch.rand(shape, generator=random) < 0.7
                mask[:, 0] = True
                return mask if self.kind == "mask" else ~mask
            case "map":
                return tree.ancestors(self.level, of=self.other).long()
            case "counts":
                return tree.offsets(self.other, of=self.level).diff().long()
        raise ValueError(f"no kind of input is called {self.kind!r}")


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: its key in `ZOO`, `SIZES` and `TINY`.
        model: its class.
        takes: its inputs in the order of its `forward`.
        broadcast: True if inputs arrive broadcast to the items; otherwise the model takes maps or
            counts and broadcasts by itself.
    """

    name: str
    model: type[nn.Module]
    takes: Mapping[str, Input]
    broadcast: bool = False

    def build(self, sizes: Sizes) -> nn.Module:
        """The model in eval mode, the same parameters every time, of dtype `sizes.dtype`.

        Weights keep the scale of what passes through them, as trained ones do: PyTorch's own first
        values shrink it layer by layer, until logits hardly depend on the inputs.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model(sizes)
            for part in model.modules():
                if isinstance(part, nn.Linear):
                    nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
                if isinstance(part, nn.BatchNorm1d):
                    part.running_mean.normal_()
                    part.running_var.uniform_(0.5, 2)
        return model.eval().to(sizes.dtype)

    @property
    def levels(self) -> dict[str, str]:
        """Level of the rows (dim 0) of each input as the model takes it, maps and counts aside."""
        return {
            name: "item" if self.broadcast else given.level
            for name, given in self.takes.items()
            if given.kind not in ("map", "counts")
        }

    @property
    def broadcasts(self) -> dict[str, tuple[str, str]]:
        """(fine, coarse) of each map: int64, the coarse row of every fine row."""
        return self._links("map")

    @property
    def counts(self) -> dict[str, tuple[str, str]]:
        """(coarse, fine) of each input of counts: int64, how many children every row has."""
        return self._links("counts")

    def _links(self, kind: str) -> dict[str, tuple[str, str]]:
        links = {name: given for name, given in self.takes.items() if given.kind == kind}
        return {name: (given.level, given.other) for name, given in links.items()}

    @property
    def compact(self) -> dict[str, str]:
        """The level that each input belongs to which arrives broadcast to the items."""
        if not self.broadcast:
            return {}
        levels = {name: given.level for name, given in self.takes.items()}
        return {name: level for name, level in levels.items() if level != "item"}

    @property
    def batches(self) -> dict[str, str]:
        """Level of dim 0 of every input as the model takes it, in the order of its `forward`."""
        return {name: self.levels.get(name, given.level) for name, given in self.takes.items()}

    def compact_inputs(
        self, sizes: Sizes, tree: BroadcastTree, seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Keyword inputs, each at its own level even if the model takes it broadcast."""
        random = torch.Generator().manual_seed(seed)
        drawn = {name: given.draw(sizes, tree, random) for name, given in self.takes.items()}
        return {
            name: x.to(tree.device, dtype if x.is_floating_point() else x.dtype)
            for name, x in drawn.items()
        }

    def inputs(
        self, sizes: Sizes, tree: BroadcastTree, seed: int, dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """The same values as the model takes them.

        Args:
            sizes: what the model was built with.
            tree: sorted, without capacity, with the levels "user" and "item", for a three-level
                model also "vendor".
            seed: of the values.
            dtype: of float inputs.
        """
        return self.expand(self.compact_inputs(sizes, tree, seed, dtype), tree)

    def expand(self, inputs: Mapping[str, Tensor], tree: BroadcastTree) -> dict[str, Tensor]:
        """Inputs at their own levels -> as the model takes them."""
        return {
            name: x[tree.ancestors("item", of=self.compact[name])] if name in self.compact else x
            for name, x in inputs.items()
        }


def _floats(level: str, *dims: str) -> Input:
    return Input("floats", level, (*dims, "dense"))


def _ids(level: str, *dims: str) -> Input:
    return Input("ids", level, dims)


def _history(kind: str, level: str = "user") -> Input:
    return Input(kind, level, () if kind == "lengths" else ("history",))


_ENTRIES = (
    Entry(
        "dlrm",
        DLRM,
        {
            "user_x": _floats("user"),
            "user_ids": _ids("user", "fields"),
            "history_ids": _history("ids"),
            "item_x": _floats("item"),
            "item_ids": _ids("item", "fields"),
        },
        broadcast=True,
    ),
    Entry(
        "dcn_v2",
        DCNv2,
        {
            "user_x": _floats("user"),
            "user_ids": _ids("user", "fields"),
            "item_x": _floats("item"),
            "item_ids": _ids("item", "fields"),
        },
        broadcast=True,
    ),
    Entry(
        "din",
        DIN,
        {
            "user_x": _floats("user"),
            "history_ids": _history("ids"),
            "history_lengths": _history("lengths"),
            "item_x": _floats("item"),
            "item_ids": _ids("item"),
            "item_to_user": Input("map", "item", other="user"),
        },
    ),
    Entry(
        "wukong",
        Wukong,
        {
            "user_x": _floats("user"),
            "user_ids": _ids("user", "fields"),
            "item_x": _floats("item"),
            "item_ids": _ids("item", "fields"),
            "item_to_user": Input("map", "item", other="user"),
        },
    ),
    Entry(
        "bst",
        BST,
        {
            "user_x": _floats("user"),
            "history_ids": _history("ids"),
            "history_padding": _history("padding"),
            "item_x": _floats("item"),
            "item_ids": _ids("item"),
        },
        broadcast=True,
    ),
    Entry(
        "hstu",
        HSTU,
        {
            "history_ids": _history("ids"),
            "history_x": _floats("user", "history"),
            "history_lengths": _history("lengths"),
            "item_ids": _ids("item"),
            "item_x": _floats("item"),
            "item_counts": Input("counts", "user", other="item"),
        },
    ),
    Entry(
        "phoenix",
        Phoenix,
        {
            "user_x": _floats("user"),
            "history_x": _floats("user", "history"),
            "history_mask": _history("mask"),
            "item_x": _floats("item"),
            "item_to_user": Input("map", "item", other="user"),
        },
    ),
    Entry(
        "two_tower",
        TwoTower,
        {
            "user_tokens": _floats("user", "history"),
            "user_mask": _history("mask"),
            "item_ids": _ids("item", "tokens"),
        },
        broadcast=True,
    ),
    Entry(
        "ads",
        ThreeLevelAds,
        {
            "user_x": _floats("user"),
            "history_ids": _history("ids"),
            "history_mask": _history("mask"),
            "vendor_x": _floats("vendor"),
            "catalogue_ids": _history("ids", "vendor"),
            "catalogue_mask": _history("mask", "vendor"),
            "item_x": _floats("item"),
            "item_ids": _ids("item"),
            "vendor_to_user": Input("map", "vendor", other="user"),
            "item_to_vendor": Input("map", "item", other="vendor"),
        },
    ),
)

ZOO = {entry.name: entry for entry in _ENTRIES}
"""All models by name, two levels first, three levels last."""
