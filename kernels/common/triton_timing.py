"""How long a call keeps a GPU: for offline tuning, not for benchmarks beside others."""

from __future__ import annotations

from collections.abc import Callable

from triton.testing import do_bench


def milliseconds(call: Callable[[], object]) -> float:
    """The median time of a call on the current GPU, with a cold L2 cache."""
    median: float = do_bench(call, warmup=5, rep=50, return_mode="median")
    return median
