"""What elementwise ops and norms of several levels cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ikbo_tree.analysis.call import Call
from ikbo_tree.analysis.cost import Comparison, Cost, Step, Work
from ikbo_tree.tree import BroadcastTree


def add(
    tree: BroadcastTree,
    names: Sequence[str],
    width: int,
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.add` costs: a sum where two names meet, at the coarser rows if it can be.

    Args:
        tree: the tree.
        names: levels and tables.
        width: elements of a row.
        level: level of the result; default the finest of the names.
        dtype: of all tensors.

    Raises:
        TreeError: unknown names, or names on several branches.
    """
    return _met("add", tree, names, width, level, dtype)


def mul(
    tree: BroadcastTree,
    names: Sequence[str],
    width: int,
    *,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.mul` costs; see `add`."""
    return _met("mul", tree, names, width, level, dtype)


def _met(
    op: str,
    tree: BroadcastTree,
    names: Sequence[str],
    width: int,
    level: str | None,
    dtype: torch.dtype,
) -> Comparison:
    call = Call(tree, tuple(names), level, dtype, "names")
    flat = _flat(call, op, width, names, len(names) - 1)
    steps, partial = [], set()
    for name in call.chain:
        above, own = call.above(name), name in names
        if not above and name != call.last:
            continue  # handed down as it is
        elements = call.rows(name) * width
        moved = elements * call.size if own else 0
        for producer in above:
            size = call.wide if producer in partial else call.size
            moved += call.gathered(producer, name, width, size)
        moved += elements * (call.size if name == call.last else call.wide)
        partial.add(name)
        flops = max(len(above) + own - 1, 0) * elements
        steps.append(Step(op, name, Cost(flops, moved)))
    return Comparison(Work(tuple(steps)), Work(flat))


def gate(
    tree: BroadcastTree,
    width: int,
    *,
    level: str,
    of: str,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.gate` costs: an activation of each gate, a product at the finer rows.

    Args:
        tree: the tree.
        width: elements of a row.
        level: the level of what is gated.
        of: the level or table of the gates.
        dtype: of all tensors.

    Raises:
        TreeError: neither level above the other.
    """
    call = Call(tree, (level, of), None, dtype, "level, of")
    gates = call.rows(of) * width
    *copies, product = _flat(call, "gate", width, [level, of], 1)
    elements = call.rows() * width
    activation = Step("activation", call.last, Cost(elements, 2 * elements * call.size))
    steps = (
        Step("activation", of, Cost(gates, gates * (call.size + call.wide))),
        _pass(call, "gate", width, [(level, call.size), (of, call.wide)], 1),
    )
    return Comparison(Work(steps), Work((*copies, activation, product)))


def film(
    tree: BroadcastTree,
    width: int,
    *,
    level: str,
    of: str,
    shift: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.film` costs.

    Args:
        tree: the tree.
        width: elements of a row.
        level: the level of what is scaled.
        of: the level or table of scales and shifts.
        shift: whether there are shifts.
        dtype: of all tensors.

    Raises:
        TreeError: neither level above the other.
    """
    call = Call(tree, (level, of), None, dtype, "level, of")
    names = [level, of, *([of] if shift else [])]
    step = _pass(call, "film", width, [(name, call.size) for name in names], 1 + shift)
    return Comparison(Work((step,)), Work(_flat(call, "film", width, names, 1 + shift)))


def _flat(call: Call, op: str, width: int, names: Sequence[str], each: int) -> tuple[Step, ...]:
    """Copies of coarse operands, then one pass over all; `each`: operations an element."""
    copies = [call.copy(name, width) for name in names if name != call.last]
    elements = call.rows() * width
    cost = Cost(each * elements, (len(names) + 1) * elements * call.size)
    return (*copies, Step(op, call.last, cost))


def _pass(call: Call, op: str, width: int, operands: Sequence[tuple[str, int]], each: int) -> Step:
    """One pass at the finer rows that looks coarse operands up; (name, bytes an element)."""
    elements = call.rows() * width
    moved = elements * call.size
    for name, size in operands:
        own = name == call.last
        moved += elements * size if own else call.gathered(name, call.last, width, size)
    return Step(op, call.last, Cost(each * elements, moved))


def layer_norm(
    tree: BroadcastTree,
    widths: Mapping[str, int],
    *,
    affine: bool = True,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.layer_norm` costs: one pass that reads each level's features where they lie.

    Four operations an element for mean and squared deviations, two to normalise, two for weight and
    bias, in both forms.

    Args:
        tree: the tree.
        widths: K of each level or table.
        affine: whether there are weight and bias.
        level: level of the result; default the finest of the names.
        dtype: of all tensors.

    Raises:
        TreeError: unknown names, or names on several branches.
    """
    return _norm("layer_norm", tree, widths, level, dtype, 6 + 2 * affine, 2 * affine)


def rms_norm(
    tree: BroadcastTree,
    widths: Mapping[str, int],
    *,
    affine: bool = True,
    level: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Comparison:
    """What `ikbo_tree.rms_norm` costs; see `layer_norm`.

    Two operations an element for the sum of squares, one to normalise, one for the weight.
    """
    return _norm("rms_norm", tree, widths, level, dtype, 3 + affine, int(affine))


def _norm(
    op: str,
    tree: BroadcastTree,
    widths: Mapping[str, int],
    level: str | None,
    dtype: torch.dtype,
    each: int,
    parameters: int,
) -> Comparison:
    """`each`: operations an element; `parameters`: weights of an element."""
    call = Call(tree, tuple(widths), level, dtype)
    k, rows = sum(widths.values()), call.rows()
    flops, weights = each * rows * k, parameters * k * call.size
    flat = call.copies(dict(widths))
    flat.append(Step(op, call.last, Cost(flops, 2 * rows * k * call.size + weights)))
    steps = [
        Step(op, name, Cost(0, call.gathered(name, call.last, width, call.size)))
        for name, width in widths.items()
        if name != call.last
    ]
    own = rows * (k + widths.get(call.last, 0)) * call.size + weights
    steps.append(Step(op, call.last, Cost(flops, own)))
    return Comparison(Work(tuple(steps)), Work(tuple(flat)))
