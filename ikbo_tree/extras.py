"""Optional dependencies: a missing one is a sentence with the pip line, not a traceback."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A feature needs a package of one of the extras."""


def require(module: str, extra: str) -> ModuleType:
    """Imports `module`, which `pip install "ikbo-tree[extra]"` brings.

    Raises:
        MissingExtraError: it is not installed; the message has the pip line.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f'this needs {error.name}, which is not installed: pip install "ikbo-tree[{extra}]"'
        ) from None
