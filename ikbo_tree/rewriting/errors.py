"""What the pass raises beside `TreeError`."""

from __future__ import annotations

from ikbo_tree.errors import UnsupportedError


class RefusedError(UnsupportedError):
    """A model that cannot be rewritten.

    Args:
        reason: a sentence, with the model's line where there is one.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("rewrite", "the model", reason)

    def __str__(self) -> str:
        return f"the model cannot be rewritten: {self.reason}"


class RewriteError(AssertionError):
    """The check of a rewritten model found a difference: a rule of the pass is wrong."""
