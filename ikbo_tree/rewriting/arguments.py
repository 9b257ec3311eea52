"""Arguments of ATen ops by the names of their schemas, and Values among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ikbo_tree.rewriting.rowwise import Operand
from ikbo_tree.rewriting.values import Cat, Dense, Index, Later, Lazy

VALUES = (Dense, Lazy, Index, Cat, Later)


def flatten(values: Any) -> list[Any]:
    """The entries of nested lists."""
    found = []
    for value in values:
        found += flatten(value) if isinstance(value, (list, tuple)) else [value]
    return found


def swapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nested list with its tensors changed."""
    if isinstance(value, (list, tuple)):
        return [swapped(x, change) for x in value]
    return change(value) if isinstance(value, VALUES) else value


def swapped_operands(value: Any, change: Callable[[Operand], Operand]) -> Any:
    """A nested list with its operands changed."""
    if isinstance(value, (list, tuple)):
        return [swapped_operands(x, change) for x in value]
    return change(value) if isinstance(value, Operand) else value


def swapped_nodes(args: dict[str, Any], change: Callable[[fx.Node], Any]) -> dict[str, Any]:
    """Arguments with their nodes changed."""
    return {name: _swapped_node(x, change) for name, x in args.items()}


def _swapped_node(value: Any, change: Callable[[fx.Node], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_swapped_node(x, change) for x in value]
    return change(value) if isinstance(value, fx.Node) else value


def bind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of an op's schema, defaults filled in."""
    bound = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def arranged(target: Any, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position as far as a schema has positions, without defaults at the end."""
    positional, named = [], {}
    for argument in target._schema.arguments:
        value = args[argument.name]
        if argument.kwarg_only:
            if not (argument.has_default_value() and value == argument.default_value):
                named[argument.name] = value
        else:
            positional.append(value)
    defaults = [a for a in target._schema.arguments if not a.kwarg_only]
    while positional and defaults[len(positional) - 1].has_default_value():
        last = positional[-1]
        if (
            isinstance(last, (fx.Node, torch.Tensor))
            or last != defaults[len(positional) - 1].default_value
        ):
            break
        positional.pop()
    return positional, named


def swapped_args(args: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Arguments with their tensors changed."""
    return {name: swapped(x, change) for name, x in args.items()}
