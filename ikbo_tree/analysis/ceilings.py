"""What a device can do at most: measured numbers, from a results file or the caller."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ceilings:
    """Of one device, for one dtype.

    Attributes:
        bytes_per_second: of a large copy, bytes read and written.
        flops_per_second: of a large matrix product.
        source: where the numbers are from.

    Raises:
        ValueError: a number that is not positive and finite.

    >>> Ceilings(bytes_per_second=4e12, flops_per_second=8e14).flops_a_byte
    200.0
    """

    bytes_per_second: float
    flops_per_second: float
    source: str = "the caller"

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "flops_per_second"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite; got {value}")

    @property
    def flops_a_byte(self) -> float:
        """Operations that it does while it moves a byte: above it, work is bound by arithmetic."""
        return self.flops_per_second / self.bytes_per_second

    @classmethod
    def from_results(cls, path: str | Path) -> Ceilings:
        """Those that a benchmark measured in its own run.

        Args:
            path: a file of `benchmarks/results`, or one that a command wrote with `--json`. Its
                matrix products are of the dtype that the benchmark says.

        Raises:
            ValueError: the file has no ceilings.
        """
        content = json.loads(Path(path).read_text())
        found = content.get("ceilings") if isinstance(content, dict) else None
        found = found if isinstance(found, dict) else {}
        copy, product = found.get("copy_gbps"), found.get("matmul_tflops")
        if copy is None or product is None:
            raise ValueError(f"path must have copy_gbps and matmul_tflops; got {path}: {found}")
        return cls(copy * 1e9, product * 1e12, f"{content.get('device')}, {Path(path).name}")
