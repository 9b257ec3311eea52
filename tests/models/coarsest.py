"""Which ops of a model run on the coarsest rows they could: seen from outside, as it runs.

A value depends on the levels of the inputs that it was calculated from; rows of what depends on
users alone are alike for all of a user's items. An op is at its coarsest level if no tensor it
reads or writes has rows of a finer level than its operands depend on. Row counts are primes that
divide no width, so a size tells the level it belongs to. Nothing of the rewrite is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

MAP = "map"
"""What an input depends on that only says which rows belong together."""

_MOVES = """alias arange as_strided broadcast_to cat chunk clone constant_pad_nd contiguous detach
empty expand flatten full gather index index_fill index_select lift_fresh narrow ones pad permute
repeat repeat_interleave reshape select slice split split_with_sizes squeeze stack t tile to
to_copy transpose unbind unflatten unsafe_view unsqueeze view zeros zeros_like"""
MOVES = frozenset(_MOVES.split())
"""Ops that move or make values and calculate none, without underscores around their names."""


@dataclass(frozen=True)
class Op:
    """One call.

    Attributes:
        name: of the op.
        depends: the finest level that its operands were calculated from.
        rows: the finest level of whose rows it saw any.
    """

    name: str
    depends: str
    rows: str | None


class LevelsSeen(TorchDispatchMode):
    """Records the ops that calculate with a batch's values while it is active.

    Under `torch.inference_mode`, where composite ops reach the dispatcher whole.

    Args:
        rows: primes, of every level, coarse first.
        inputs: for each input tensor the level of what it holds, or `MAP`.

    Attributes:
        ops: in order.
    """

    def __init__(self, rows: Mapping[str, int], inputs: Iterable[tuple[Tensor, str]]) -> None:
        super().__init__()
        self.rows = dict(rows)
        self.ops: list[Op] = []
        self._order = [MAP, *rows]
        self._depends: Any = WeakIdKeyDictionary()
        for x, level in inputs:
            self._depends[x] = level

    def share(self) -> float:
        """Of all ops, those at their coarsest level."""
        return sum(self.coarsest(op) for op in self.ops) / len(self.ops)

    def coarsest(self, op: Op) -> bool:
        """Whether it saw no finer rows than it needed."""
        return op.rows is None or self._order.index(op.rows) <= self._order.index(op.depends)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0].strip("_")
        took, gave = list(_tensors((args, kwargs))), list(_tensors(out))
        for x in gave:
            depends = self._finest(took)
            if depends is not None:
                self._depends[x] = depends
        if namespace == "ikbo_tree" and name in ("linear", "linear_compression"):
            # One call, but a product a level: x[l] times weight[l], the last one giving the result.
            *parts, last = (list(_tensors(part)) for part in zip(args[0], args[1], strict=True))
            for part in parts:
                self._add(name, part, [])
            self._add(name, last + gave, last + gave)
        elif name not in MOVES and any(x.is_floating_point() for x in gave or took):
            self._add(name, took, gave)
        return out

    def _add(self, name: str, took: list[Tensor], gave: list[Tensor]) -> None:
        depends = self._finest(took)
        if depends not in (None, MAP):
            seen = [self._level_of(x) for x in took + gave]
            known = [level for level in seen if level is not None]
            self.ops.append(Op(name, depends, max(known, key=self._order.index, default=None)))

    def _finest(self, tensors: list[Tensor]) -> str | None:
        known = [self._depends[x] for x in tensors if x in self._depends]
        return max(known, key=self._order.index, default=None)

    def _level_of(self, x: Tensor) -> str | None:
        found = None
        for level, rows in self.rows.items():
            if any(size > 0 and size % rows == 0 for size in x.shape):
                found = level
        return found


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))
