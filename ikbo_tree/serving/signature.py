"""What a served model takes and gives: levels, tables, inputs, the level of its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
class Coarse:
    """A part of the model that needs the rows of one table alone, e.g. a user's projected history.

    What it gives for a row follows from that row's own inputs, so it can be kept (`CoarseCache`).

    Attributes:
        takes: inputs of the request, all of them at the table, which this part gets and the rest of
            the model does not.
        gives: inputs of the rest of the model, by argument name, which this part computes.
    """

    takes: tuple[str, ...]
    gives: Mapping[str, Input]

    @property
    def row_bytes(self) -> int:
        """Bytes of what it gives for one row."""
        return sum(given.row_bytes for given in self.gives.values())


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
        coarse: for some of the tables a part of the model that is run on its rows first.
    """

    root: str
    parents: Mapping[str, str]
    inputs: Mapping[str, Input]
    output: str
    tables: Mapping[str, str] = field(default_factory=dict)
    independent: bool = False
    coarse: Mapping[str, Coarse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        levels = self.structure.levels
        for table, level in self.tables.items():
            if table in levels:
                raise TreeError("tables", "must have new names", repr(table))
            self.structure.at(f'tables["{table}"]', level)
        self.structure.at("output", self.output)
        for name, given in self.inputs.items():
            _check(f'inputs["{name}"]', name, given, [*levels, *self.tables])
        self._check_coarse()

    def _check_coarse(self) -> None:
        known = set(self.inputs)
        for table, part in self.coarse.items():
            argument = f'coarse["{table}"]'
            if table not in self.tables:
                raise TreeError(argument, f"must be of one of the tables {[*self.tables]}", table)
            elsewhere = [
                x for x in part.takes if x not in self.inputs or self.inputs[x].at != table
            ]
            if elsewhere or not part.takes:
                raise TreeError(
                    argument, f"must take inputs at {table!r}", str(elsewhere or "none")
                )
            if not part.gives:
                raise TreeError(argument, "must give something", "nothing")
            for name, given in part.gives.items():
                if name in known:
                    raise TreeError(argument, "must give new arguments", repr(name))
                _check(f'{argument}.gives["{name}"]', name, given, [table])
                known.add(name)

    @property
    def structure(self) -> Structure:
        """The levels as trees have them."""
        return Structure.build(self.root, tuple(self.parents), dict(self.parents))

    @property
    def levels(self) -> tuple[str, ...]:
        """Names, root first."""
        return (self.root, *self.parents)

    @property
    def behind_coarse(self) -> Signature:
        """Of the model without its coarse parts, which takes what they give."""
        taken = {name for part in self.coarse.values() for name in part.takes}
        inputs = {name: given for name, given in self.inputs.items() if name not in taken}
        for part in self.coarse.values():
            inputs |= part.gives
        return replace(self, inputs=inputs, coarse={})

    def level_of(self, name: str) -> str:
        """The level whose rows a request gives for a level or table."""
        return self.tables.get(name, name)

    @property
    def is_chain(self) -> bool:
        """Every level hangs under the one before it."""
        return list(self.parents.values()) == list(self.levels[:-1])

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return {
            "root": self.root,
            "parents": dict(self.parents),
            "inputs": _plain(self.inputs),
            "output": self.output,
            "tables": dict(self.tables),
            "independent": self.independent,
            "coarse": {
                table: {"takes": list(part.takes), "gives": _plain(part.gives)}
                for table, part in self.coarse.items()
            },
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The signature that `to_json` wrote.

        Raises:
            TreeError: names that do not fit together.
            KeyError: an entry is missing.
        """
        return cls(
            content["root"],
            content["parents"],
            _inputs(content["inputs"]),
            content["output"],
            content["tables"],
            content["independent"],
            {
                table: Coarse(tuple(part["takes"]), _inputs(part["gives"]))
                # Files written before there were coarse parts have no such entry.
                for table, part in content.get("coarse", {}).items()
            },
        )


def _check(argument: str, name: str, given: Input, places: list[str]) -> None:
    if name == "tree" or not name.isidentifier():
        raise TreeError(argument, "must be an argument's name, not `tree`", repr(name))
    if given.at not in places:
        raise TreeError(argument, f"must be at one of {places}", repr(given.at))
    if given.dtype not in DTYPES.values():
        raise TreeError(argument, f"must be of {', '.join(DTYPES)}", str(given.dtype))
    if given.integral and given.bounds is None:
        raise TreeError(argument, "must have bounds, as all integers", "none")


def _plain(inputs: Mapping[str, Input]) -> dict[str, dict[str, Any]]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        name: {
            "at": given.at,
            "dtype": names[given.dtype],
            "shape": list(given.shape),
            "bounds": None if given.bounds is None else list(given.bounds),
        }
        for name, given in inputs.items()
    }


def _inputs(plain: Mapping[str, Any]) -> dict[str, Input]:
    return {
        name: Input(
            given["at"],
            DTYPES[given["dtype"]],
            tuple(given["shape"]),
            None if given["bounds"] is None else (given["bounds"][0], given["bounds"][1]),
        )
        for name, given in plain.items()
    }
