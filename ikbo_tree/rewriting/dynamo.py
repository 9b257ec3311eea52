"""`torch.compile(model, backend="ikbo")`: the rewrite of graphs that Dynamo captures.

Dynamo has guards on the sizes that it makes constants of, and compiles again for others; so its
graphs are rewritten for the sizes they hold for. Inputs are told apart by the names they have in
the compiled function; what has no declared name, as parameters, has no level.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import sympy
import torch
from torch import Tensor, fx, nn

from ikbo_tree.rewriting.errors import RefusedError

Backend: TypeAlias = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

_T = TypeVar("_T")

NAME = "ikbo"
_LOCAL = re.compile(r"L\['(\w+)'\]")


@dataclass(frozen=True)
class _Declarations:
    levels: Mapping[str, str]
    broadcasts: Mapping[str, tuple[str, str]]
    counts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    inner: str | Backend = "inductor"
    profit: bool = True


_DECLARED: ContextVar[_Declarations | None] = ContextVar("declared", default=None)


def backend(
    *,
    levels: Mapping[str, str],
    broadcasts: Mapping[str, tuple[str, str]] | None = None,
    counts: Mapping[str, tuple[str, str]] | None = None,
    inner: str | Backend = "inductor",
    profit: bool = True,
) -> Backend:
    """A backend for `torch.compile` that rewrites what it is given, then lets another compile it.

    By the rules of `ikbo_tree.rewrite`, but for each graph that Dynamo captures, at its sizes, and
    without the check on random trees. A graph without declared maps among its inputs is compiled as
    it is.

    Args:
        levels: for each input with rows in dim 0, by its name in the compiled function, the level
            they belong to.
        broadcasts: for each input that is a map, (fine, coarse).
        counts: for each input with numbers of children, (coarse, fine).
        inner: the backend that compiles the result, by name or itself.
        profit: as in `rewrite`.

    Returns:
        What `torch.compile` takes as `backend`. It raises `UnsupportedError`, which Dynamo reports,
        for graphs that `rewrite` refuses.

    >>> def scores(user_x, item_x, item_to_user):
    ...     return (user_x.exp()[item_to_user] * item_x).sum(1)
    >>> levels = {"user_x": "user", "item_x": "item"}
    >>> maps = {"item_to_user": ("item", "user")}
    >>> ikbo = backend(levels=levels, broadcasts=maps, inner="eager")
    >>> inputs = torch.zeros(2, 3), torch.ones(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> torch.compile(scores, backend=ikbo)(*inputs).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0]
    """
    declarations = _Declarations(levels, broadcasts or {}, counts or {}, inner, profit)

    def ikbo(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return _compiled(graph, inputs, declarations)

    return ikbo


@contextmanager
def declared_inputs(
    *,
    levels: Mapping[str, str],
    broadcasts: Mapping[str, tuple[str, str]] | None = None,
    counts: Mapping[str, tuple[str, str]] | None = None,
    inner: str | Backend = "inductor",
    profit: bool = True,
) -> Iterator[None]:
    """Declares inputs for whatever `torch.compile(..., backend="ikbo")` compiles meanwhile.

    Arguments are those of `backend`. The name is known to Dynamo from the first use on. Compilation
    takes place at calls; one outside such a context raises `UnsupportedError`.
    """
    register()
    token = _DECLARED.set(_Declarations(levels, broadcasts or {}, counts or {}, inner, profit))
    try:
        yield
    finally:
        _DECLARED.reset(token)


def register() -> None:
    """Makes the name `"ikbo"` known to `torch.compile`; importing Dynamo takes seconds."""
    from torch._dynamo.backends import registry

    if registry._COMPILER_FNS.get(NAME) is not by_name:
        registry.register_backend(by_name, name=NAME)


def by_name(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The backend `"ikbo"`, which knows inputs from `declared_inputs`."""
    declarations = _DECLARED.get()
    if declarations is None:
        raise RefusedError(
            'backend "ikbo" compiles only within ikbo_tree.rewriting.declared_inputs(levels=...), '
            "or take ikbo_tree.rewriting.backend(levels=...) as backend"
        )
    return _compiled(graph, inputs, declarations)


@dataclass(frozen=True)
class _Graph:
    """A graph of Dynamo's and its inputs, told apart.

    Attributes:
        module: it.
        names: of all its inputs that are tensors, by position.
        tensors: these.
        fakes: what Dynamo knows of them: sizes may be symbols.
        sizes: (name of a tensor, dim) that an input which is a number is the size of, by position.
    """

    module: fx.GraphModule
    names: dict[int, str]
    tensors: dict[str, Tensor]
    fakes: dict[str, Tensor]
    sizes: dict[int, tuple[str, int]]


def _told_apart(module: fx.GraphModule, inputs: list[Any]) -> _Graph:
    names: dict[int, str] = {}
    fakes: dict[str, Tensor] = {}
    numbers: dict[int, Any] = {}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        known = node.meta["example_value"]
        if not isinstance(known, Tensor):
            numbers[i] = known
            continue
        source = getattr(node, "_dynamo_source", None)
        local = _LOCAL.fullmatch(source.name if source is not None else "")
        names[i] = local.group(1) if local else f"{node.name}_"
        fakes[names[i]] = known
    places = {
        expression: (name, dim)
        for name, x in fakes.items()
        for dim, expression in _symbols(x).items()
    }
    sizes = {}
    for i, number in numbers.items():
        place = places.get(number.node.expr) if isinstance(number, torch.SymInt) else None
        if place is None:
            raise RefusedError(f"its input {i} is a number ({number}) that is no tensor's size")
        sizes[i] = place
    tensors = {name: inputs[i] for i, name in names.items()}
    return _Graph(module, names, tensors, fakes, sizes)


class _OfTensors(nn.Module):
    """A graph of Dynamo's that takes tensors by name, and their sizes from them."""

    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self.module = graph.module
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in graph.tensors
        ]

        def forward(**tensors: Tensor) -> Any:
            own: dict[int, Any] = {i: tensors[name] for i, name in graph.names.items()}
            own |= {i: tensors[name].shape[dim] for i, (name, dim) in graph.sizes.items()}
            return graph.module(*(own[i] for i in sorted(own)))

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _dynamic(graph: _Graph, levels: Mapping[str, str]) -> dict[str, Any]:
    """A named Dim for each symbol, one for all symbols of a level."""
    dims: dict[Any, Any] = {}
    found: dict[str, Any] = {}
    for name, fake in graph.fakes.items():
        own: dict[int, Any] = {}
        for dim, symbol in _symbols(fake).items():
            if not symbol.is_Symbol:
                own[dim] = torch.export.Dim.AUTO
                continue
            level = levels.get(name) if dim == 0 else None
            chosen = dims.get(symbol) or dims.get(level) or torch.export.Dim(f"d{len(dims)}")
            dims.setdefault(symbol, chosen)
            if level is not None:
                dims.setdefault(level, chosen)
            own[dim] = chosen
        found[name] = own or None
    return found


def _symbols(fake: Tensor) -> dict[int, sympy.Expr]:
    """The expressions of the dims whose sizes are not numbers."""
    sizes: dict[int, Any] = dict(enumerate(fake.shape))
    found = {dim: n.node.expr for dim, n in sizes.items() if isinstance(n, torch.SymInt)}
    return {dim: expression for dim, expression in found.items() if not expression.is_number}


def _compiled(
    module: fx.GraphModule, inputs: list[Any], declarations: _Declarations
) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import lookup_backend

    inner = lookup_backend(declarations.inner)
    graph = _told_apart(module, inputs)
    own = {**declarations.broadcasts, **declarations.counts}
    if not any(name in graph.tensors for name in own):
        return inner(module, inputs)
    # Within Dynamo export would take itself for a part of it.
    with torch._guards.tracing(None):
        rewritten = _rewritten(graph, declarations)
    run = inner(rewritten, list(graph.tensors.values()))

    def call(*args: Any) -> Any:
        return run(*(args[i] for i in graph.names))

    return call


def _among(tensors: Mapping[str, Tensor], declared: Mapping[str, _T]) -> dict[str, _T]:
    return {name: value for name, value in declared.items() if name in tensors}


def _rewritten(graph: _Graph, declarations: _Declarations) -> fx.GraphModule:
    """The graph of tensors alone, by position."""
    from ikbo_tree.rewriting.capture import exported
    from ikbo_tree.rewriting.graph_pass import Rewriting
    from ikbo_tree.rewriting.inputs import Declared
    from ikbo_tree.rewriting.profit import Profit

    given = Declared(
        graph.tensors,
        _among(graph.tensors, declarations.levels),
        _among(graph.tensors, declarations.broadcasts),
        _among(graph.tensors, declarations.counts),
    )
    captured = exported(
        _OfTensors(graph).eval(), graph.tensors, _dynamic(graph, given.batches), any_rows=False
    )
    if declarations.profit:
        rewriting = Profit(captured, given).best()
    else:
        rewriting = Rewriting(captured, given)
        rewriting.run()
    return rewriting.flat()
