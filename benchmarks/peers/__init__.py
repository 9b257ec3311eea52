"""Adapters: how other implementations of the same operations are called; none of their code.

What is not installed raises `MissingPeerError` with the reason, and is left out of a benchmark.
"""


class MissingPeerError(RuntimeError):
    """A peer that cannot be called here."""
