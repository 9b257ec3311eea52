"""What a served model takes and gives: levels, tables, inputs, the level of its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ikbo_tree.errors import TreeError
from ikbo_tree.mapping.structure import Structure

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
}
"""Dtypes of inputs by name."""


@dataclass(frozen=True)
class Input:
    """One tensor argument of the model, [rows of `at`, *shape].

    Attributes:
        at: its level or table.
        dtype: one of `DTYPES`.
        shape: of one row.
        bounds: the smallest and largest value; integers must have them: an id past the end of a
            vocabulary would bring down a GPU for every caller.
    """

    at: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    bounds: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def integral(self) -> bool:
        """Whether values are integers (bool is none)."""
        return not self.dtype.is_floating_point and self.dtype != torch.bool

    @property
    def filling(self) -> int:
        """What rows without data hold: 0, or the bound nearest to it."""
        low, high = self.bounds or (0, 0)
        return min(max(0, low), high)


@dataclass(frozen=True)
class Signature:
    """How a model is called: `model(tree=tree, **inputs)` gives scores [rows of `output`, ...].

    Attributes:
        root: the root level's name.
        parents: for each level below it, coarse first, the level that it hangs under.
        inputs: the tensors, by argument name.
        output: the level that has scores.
        tables: for each table of the tree the level whose rows it deduplicates. Requests give the
            table's inputs once a row of that level, with a key a row; equal rows are one row of
            the table, whichever request they came with.
        independent: a score depends on its own row and the rows above it alone, not on other
            candidates. Only then may one root row's candidates be scored in several calls.
    """

    root: str
    parents: Mapping[str, str]
    inputs: Mapping[str, Input]
    output: str
    tables: Mapping[str, str] = field(default_factory=dict)
    independent: bool = False

    def __post_init__(self) -> None:
        levels = self.structure.levels
        for table, level in self.tables.items():
            if table in levels:
                raise TreeError("tables", "must have new names", repr(table))
            self.structure.at(f'tables["{table}"]', level)
        self.structure.at("output", self.output)
        for name, given in self.inputs.items():
            argument = f'inputs["{name}"]'
            if name == "tree" or not name.isidentifier():
                raise TreeError(argument, "must be an argument's name, not `tree`", repr(name))
            if given.at not in (*levels, *self.tables):
                places = [*levels, *self.tables]
                raise TreeError(argument, f"must be at one of {places}", repr(given.at))
            if given.dtype not in DTYPES.values():
                raise TreeError(argument, f"must be of {', '.join(DTYPES)}", str(given.dtype))
            if given.integral and given.bounds is None:
                raise TreeError(argument, "must have bounds, as all integers", "none")

    @property
    def structure(self) -> Structure:
        """The levels as trees have them."""
        return Structure.build(self.root, tuple(self.parents), dict(self.parents))

    @property
    def levels(self) -> tuple[str, ...]:
        """Names, root first."""
        return (self.root, *self.parents)

    def level_of(self, name: str) -> str:
        """The level whose rows a request gives for a level or table."""
        return self.tables.get(name, name)

    @property
    def is_chain(self) -> bool:
        """Every level hangs under the one before it."""
        return list(self.parents.values()) == list(self.levels[:-1])

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        return {
            "root": self.root,
            "parents": dict(self.parents),
            "inputs": {
                name: {
                    "at": given.at,
                    "dtype": names[given.dtype],
                    "shape": list(given.shape),
                    "bounds": None if given.bounds is None else list(given.bounds),
                }
                for name, given in self.inputs.items()
            },
            "output": self.output,
            "tables": dict(self.tables),
            "independent": self.independent,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The signature that `to_json` wrote.

        Raises:
            TreeError: names that do not fit together.
            KeyError: an entry is missing.
        """
        inputs = {
            name: Input(
                given["at"],
                DTYPES[given["dtype"]],
                tuple(given["shape"]),
                None if given["bounds"] is None else (given["bounds"][0], given["bounds"][1]),
            )
            for name, given in content["inputs"].items()
        }
        return cls(
            content["root"],
            content["parents"],
            inputs,
            content["output"],
            content["tables"],
            content["independent"],
        )
