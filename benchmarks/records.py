"""Results files whose records are not times of contenders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import harness


def write(
    topic: str,
    device: str,
    records: Sequence[Mapping[str, Any]],
    folder: Path = harness.RESULTS,
    **more: Any,
) -> Path:
    """Writes `<topic>_<device>.json`, as `harness.Results` does, and returns its path.

    Args:
        topic: what was measured.
        device: its name.
        records: each with a `workload`; the other keys are the topic's.
        folder: where to.
        more: what else the file has.
    """
    path = folder / f"{topic}_{harness.slug(device)}.json"
    content = {
        "device": device,
        "date": datetime.now(UTC).date().isoformat(),
        "command": harness.command(),
        "versions": harness.versions(),
        "ceilings": {"copy_gbps": None, "matmul_tflops": None},
        "records": list(records),
        **more,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
