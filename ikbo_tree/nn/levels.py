"""What the modules share: widths by level, weights split by them, autocast, rows that count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ikbo_tree.errors import TreeError
from ikbo_tree.kernels.common.routes import zero_dead_rows
from ikbo_tree.ops.memories import Memory, shape_of
from ikbo_tree.tree import BroadcastTree


def checked_widths(widths: Mapping[str, int]) -> dict[str, int]:
    """A copy, in the same order: that of the columns of a flat weight.

    Raises:
        ValueError: no name at all, or a width below 1.
    """
    if not widths or min(widths.values()) < 1:
        raise ValueError(f"widths must name levels with at least one feature; got {dict(widths)}")
    return dict(widths)


def total_width(widths: Mapping[str, int], flat: int, what: str) -> dict[str, int]:
    """The widths, checked to fill the columns of a flat module.

    Raises:
        ValueError: they add up to something else.
    """
    widths = checked_widths(widths)
    if sum(widths.values()) != flat:
        total = sum(widths.values())
        raise ValueError(f"widths must add up to the {flat} {what} of the flat module; got {total}")
    return widths


def split_columns(weight: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of the columns of a flat `weight` [N, K] that belong to each level."""
    return dict(zip(widths, weight.split(list(widths.values()), dim=1), strict=True))


def in_order(inputs: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """The inputs in the order of the columns.

    Raises:
        TreeError: other names than the module's, or another width.
    """
    if inputs.keys() != widths.keys():
        raise TreeError("inputs", f"must have the names {list(widths)}", str(list(inputs)))
    for name, width in widths.items():
        x = inputs[name]
        if x.dim() < 2 or x.shape[1] != width:
            raise TreeError(f'inputs["{name}"]', f"must have {width} in dim 1", shape_of(x))
    return {name: inputs[name] for name in widths}


def described(widths: Mapping[str, int]) -> str:
    """Widths by level, for `extra_repr`."""
    return ", ".join(f"{name}={width}" for name, width in widths.items())


def cast(x: Tensor) -> Tensor:
    """`x` in the dtype that autocast, where it is on, gives to the inputs of a linear map."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


@contextlib.contextmanager
def as_cast(x: Tensor) -> Iterator[None]:
    """Autocast off: ops get what `cast` made and calculate with it in float32 themselves."""
    with torch.autocast(x.device.type, enabled=False):
        yield


def share(module: nn.Module, flat: nn.Module) -> None:
    """Lets a module have a flat one's own parameters and submodules, by their names."""
    for name, parameter in flat._parameters.items():
        module.register_parameter(name, parameter)
    for name, part in flat._modules.items():
        module.add_module(name, part)
    module.train(flat.training)


def live_rows(x: Tensor, tree: BroadcastTree, level: str) -> Tensor:
    """`x` with zeros in the rows of a level that do not count."""
    return zero_dead_rows(x, tree.live(level))


def owned_entries(x: Tensor, memory: Memory, tree: BroadcastTree) -> Tensor:
    """`x` with zeros in the entries that no row owns: they add nothing to a weight's gradient.

    Args:
        x: [rows, S, ...], or packed [total, ...].
        memory: says who owns what, by its lengths or offsets.
        tree: the tree.
    """
    live = tree.live(memory.level)
    if memory.offsets is None:
        lengths, rows = memory.lengths, x.shape[0]
        if lengths is None:
            return zero_dead_rows(x, live)
        mask = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
        if live is not None:
            mask = mask & (torch.arange(rows, device=x.device) < live).unsqueeze(1)
        return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, x.new_zeros(()))
    offsets = memory.offsets
    first = offsets[:1]
    last = offsets[-1:] if live is None else offsets.index_select(0, live)
    at = torch.arange(x.shape[0], device=x.device)
    mask = (at >= first) & (at < last)
    return torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, x.new_zeros(()))
