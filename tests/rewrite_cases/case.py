"""What a micro-model is, and the short form in which the other files declare them.

    case("relu", lambda m, u, i, idx: torch.relu(u[idx]) + i, sunk="relu")

`m` is the model itself, with the layers given by name; the other arguments are inputs of
`inputs.INPUTS`, which knows their levels. The function becomes the `forward` of a module.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ikbo_tree import BroadcastTree
from rewrite_cases.inputs import INPUTS, Input, make_input


@dataclass(frozen=True)
class Case:
    """One op or idiom, and what a rewrite must make of it.

    Row counts are those that `rows_seen.RowsSeen` sees. Names of ops are like `"aten.relu"`, which
    stands for any overload and for its in-place and underscored forms; `"aten.relu@vendor"` names
    the level, `"aten.relu"` alone means "user".

    Attributes:
        name: unique.
        module: makes the model: eval mode unless the case is about training, fixed float32
            parameters, none of them all equal.
        inputs: (tree, seed) -> keyword inputs in the order of `forward`; those in `compact` come
            with the rows of their own level, and `flat` makes of them what the model takes.
        levels: level of the rows of each feature input, as the original takes it.
        broadcasts: (fine, coarse) of each input that is a map.
        counts: (coarse, fine) of each input that is counts.
        compact: the coarser level of each input that the model takes already broadcast to items.
        sunk: ops that must run at the named level and at no finer one; None: only values count.
        split: ops of which some call must run at the named level, others may be finer;
            `"aten.*"` means any arithmetic.
        kept: ops that must still see rows of the finest level.
        limit: most elements that any tensor holds for each row of the finest level.
        refused: pattern of the message with which the pass must refuse.
        disagrees: pattern of what the rewritten model says of maps that differ though declared
            between the same levels; it must not give a result.
        not_exportable: pattern of torch.export's message, if it refuses the model; a rewrite may
            refuse it too, or get it right.
    """

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[BroadcastTree, int], dict[str, Tensor]]
    levels: dict[str, str]
    broadcasts: dict[str, tuple[str, str]] = field(default_factory=dict)
    counts: dict[str, tuple[str, str]] = field(default_factory=dict)
    compact: dict[str, str] = field(default_factory=dict)
    sunk: tuple[str, ...] | None = None
    split: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    limit: int | None = None
    refused: str | None = None
    disagrees: str | None = None
    not_exportable: str | None = None

    @property
    def depth(self) -> int:
        """2 where no input knows vendors, else 3."""
        named = [*self.levels.values(), *self.compact.values()]
        for pair in (*self.broadcasts.values(), *self.counts.values()):
            named.extend(pair)
        return 3 if "vendor" in named else 2

    def row_level(self, name: str) -> str:
        """The level that dimension 0 of an input of the original model belongs to."""
        maps = self.broadcasts | self.counts
        return maps[name][0] if name in maps else self.levels[name]

    def flat(self, inputs: dict[str, Tensor], tree: BroadcastTree) -> dict[str, Tensor]:
        """`inputs` as the original model takes them: those in `compact` broadcast to items."""
        made = dict(inputs)
        for name, level in self.compact.items():
            made[name] = inputs[name][tree.ancestors("item", of=level).long()]
        return made


class Cases(list[Case]):
    """The cases of one file."""

    def __init__(self, theme: str) -> None:
        super().__init__()
        self.theme = theme

    def __call__(
        self,
        name: str,
        forward: Callable[..., Any],
        *,
        sunk: str | None = None,
        split: str = "",
        kept: str = "",
        compact: str = "",
        training: bool = False,
        limit: int | None = None,
        refused: str | None = None,
        disagrees: str | None = None,
        not_exportable: str | None = None,
        **layers: Callable[[], Any],
    ) -> None:
        """Adds a case.

        Args:
            name: unique in this file.
            forward: of `m` and inputs.
            sunk, split, kept: ops without "aten.", separated by blanks.
            compact: inputs that come already broadcast, separated by blanks.
            training: the model is in training mode.
            limit, refused, disagrees, not_exportable: as in `Case`.
            **layers: attributes of `m`: functions that make a module, a parameter or a buffer.
        """
        names = tuple(inspect.signature(forward).parameters)[1:]
        declared = {name: INPUTS[name] for name in names}
        full_name = f"{self.theme}.{name}"
        features = {n: d.level for n, d in declared.items() if d.kind == "feature"}
        broadcast_before = {n: features[n] for n in compact.split()}
        self.append(
            Case(
                name=full_name,
                module=lambda: model(full_name, forward, layers, training),
                inputs=lambda tree, seed: {n: make_input(n, tree, seed) for n in names},
                levels=features | dict.fromkeys(broadcast_before, "item"),
                broadcasts=_pairs(declared, "map"),
                counts=_pairs(declared, "counts"),
                compact=broadcast_before,
                sunk=None if sunk is None else _ops(sunk),
                split=_ops(split),
                kept=_ops(kept),
                limit=limit,
                refused=refused,
                disagrees=disagrees,
                not_exportable=not_exportable,
            )
        )


def model(
    name: str, forward: Callable[..., Any], layers: dict[str, Callable[[], Any]], training: bool
) -> nn.Module:
    """A module whose `forward` is that function; equal names have equal parameters."""
    made: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        for key, make in layers.items():
            value = make()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                made.register_buffer(key, value)
            else:
                setattr(made, key, value)
        # Ones and zeros, which norms and biases start from, would hide a rule that drops them.
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
            for key, buffer in made.named_buffers():
                if key.endswith("running_mean"):
                    buffer.copy_(torch.randn(buffer.shape))
                elif key.endswith("running_var"):
                    buffer.copy_(torch.rand(buffer.shape) + 0.5)
    return made.train(training)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.empty(shape))


def linear(n_in: int, n_out: int, bias: bool = True) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(n_in, n_out, bias=bias)


def _pairs(declared: dict[str, Input], kind: str) -> dict[str, tuple[str, str]]:
    return {n: (d.level, d.coarse) for n, d in declared.items() if d.kind == kind}


def _ops(names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in names.split())
