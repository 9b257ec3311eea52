"""Which command measures which results file, and what it needs beside a Hopper GPU."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A command.

    Attributes:
        topic: of the results file that it writes.
        script: in benchmarks/.
        arguments: of the script, as one types them.
        seconds: how long it takes on an H200, about, kernels not compiled yet.
        modules: what must be importable.
        programs: what must be on the path.
        needs: the same in words.
    """

    topic: str
    script: str
    arguments: str = ""
    seconds: int = 60
    modules: Sequence[str] = ()
    programs: Sequence[str] = ()
    needs: str = ""

    @property
    def missing(self) -> str | None:
        """What it needs and is not there."""
        here = all(importlib.util.find_spec(name) for name in self.modules)
        here = here and all(shutil.which(name) for name in self.programs)
        return None if here else self.needs

    @property
    def command(self) -> str:
        """As one types it."""
        return f"python benchmarks/{self.script} {self.arguments}".strip()


_PUBLISHED = "the published kernels (module ikbo) and the Triton that compiles them (fbtriton)"
_LCE = (
    "lce-b512-r70/fwd lce-b1024-r70/fwd lce-b2048-r70/fwd lce-b3072-r70/fwd lce-b1024-r2/fwd"
    " lce-b1024-r10/fwd lce-b1024-r1000/fwd lce3-b1024-r64/fwd lce3-uneven/fwd lce-b1024-r70/bwd"
    " lce3-b1024-r64/bwd lce3-uneven/bwd lce3-b1024-r64/fwd_bwd lce-b1024-r70/fwd_bwd"
)
_TUNED = "lce-b1024-r70/fwd lce3-b1024-r64/fwd lce-b1024-r10/fwd lce-b1024-r70/fwd_bwd"

_RUNS = (
    Run("lce", "bench_lce.py", f"--workload {_LCE} --compiled {_TUNED} --rounds 24", 420),
    Run(
        "lce-published",
        "bench_lce.py",
        (
            "--topic lce-published --rounds 20 --workload lce-b1024-r70/fwd lce-b512-r70/fwd"
            " lce-b1024-r10/fwd lce-b2048-r70/fwd --compiled --who ikbo-gluon ikbo-gluon-p16"
            " ikbo-triton published-triton published-tlx cublas-candidate"
        ),
        120,
        modules=("ikbo",),
        needs=_PUBLISHED,
    ),
    Run(
        "lce-depth",
        "bench_lce.py",
        (
            "--topic lce-depth --rounds 12 --workload lce-b1024-r64 lce3-b1024-r64 lce4-b1024-r64"
            " --compiled"
        ),
        60,
    ),
    Run("attention", "bench_attention.py", "--rounds 20", 540),
    Run(
        "attention-published",
        "bench_attention.py",
        (
            "--topic attention-published --impl triton --rounds 20 --forward-only"
            " attn-s512-r64-n64-h2-d128 attn-s1024-r64-n64-h2-d128 attn-s2048-r64-n64-h2-d128"
            " attn-s4096-r64-n64-h2-d128"
        ),
        180,
        modules=("ikbo",),
        needs=_PUBLISHED,
    ),
    Run(
        "attention-sweeps",
        "bench_attention.py",
        "--sweeps --topic attention-sweeps --forward-only --rounds 10",
        120,
    ),
    Run("self-attention", "bench_self_attention.py", "", 60),
    Run("numerics", "bench_numerics.py", "", 60),
    Run("invariance", "bench_invariance.py", "", 30),
    Run("whole-model", "bench_whole_model.py", "", 180),
    Run("ablation", "ablate_kernels.py", "", 300),
    Run(
        "counters",
        "profile_kernels.py",
        "--ncu counters.csv",
        120,
        programs=("ncu",),
        needs="Nsight Compute (ncu) and permission to read counters",
    ),
    Run("timeline", "profile_kernels.py", "--timeline", 60),
)

RUNS = {run.topic: run for run in _RUNS}
"""By topic, in the order in which they run."""
