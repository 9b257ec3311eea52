"""`target_attention` on a GPU beside everybody else: python benchmarks/bench_attention.py.

All contenders of a workload take turns in one process, with a cold L2. Each result is compared with
ours before it is timed. TFLOP/s count useful work: 4 * query rows * heads * dim * keys forward, 2.5
times that backward. `bwd` is the backward alone, from a forward that was kept. Writes
benchmarks/results/attention_<device>.json.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence

import torch
from attention_data import Data, Workload, sweeps, workloads
from cuda_timing import (
    ColdClock,
    cuda_ceilings,
    device_name,
    graphed,
    graphed_backward,
    host_us,
    peak_mb,
)
from harness import Contender, Results, Timing, interleaved
from peers import MissingPeerError, cascade, flash_attention, published, sdpa
from torch import Tensor

from ikbo_tree.errors import UnsupportedError

PEERS = {
    "cudnn-broadcast": sdpa.broadcast,
    "cudnn-copied": sdpa.copied,
    "cudnn-folded": sdpa.cudnn_folded,
    "flash-folded": sdpa.flash_folded,
    "fa4-broadcast": flash_attention.broadcast,
    "fa4-copied": flash_attention.copied,
    "fa4-folded": flash_attention.folded,
    "fa4-varlen": flash_attention.varlen,
    "published-triton": published.triton,
    "published-tlx": published.tlx,
    "flashinfer-cascade": cascade.flashinfer,
}
OURS = ("gluon", "triton")
TOLERANCE = 0.01
"""Of the norm of the difference to ours: a few roundings; no speed counts on wrong results."""


def ours(data: Data, impls: Sequence[str]) -> dict[str, Contender]:
    """Our implementations that take the workload, the reference of all others first."""
    found: dict[str, Contender] = {}
    for impl in impls:
        try:
            data.ours(impl)
        except UnsupportedError:
            continue
        found[f"ikbo-{impl}"] = lambda impl=impl: data.ours(impl)
    return found


def available(
    data: Data, peers: Sequence[str] = tuple(PEERS)
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The peers that can take a workload, and why the others cannot."""
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name in peers:
        make = PEERS[name]
        try:
            contender = make(data)
            contender()
        except MissingPeerError as reason:
            missing[name] = str(reason)
        except Exception as error:  # whatever a stranger's kernel raises
            missing[name] = f"it raised {error!r:.160}"
        else:
            found[name] = contender
    return found, missing


def agreeing(
    contenders: dict[str, Contender], missing: dict[str, str], expected: list[Tensor]
) -> dict[str, Contender]:
    """Those whose results are ours."""
    right = {}
    for name, contender in contenders.items():
        result = contender()
        got = list(result) if isinstance(result, tuple) else [result]
        error = max(
            float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())
            for a, b in zip(got, expected, strict=True)
            if isinstance(a, Tensor)
        )
        if error < TOLERANCE:
            right[name] = contender
        else:
            missing[name] = f"its result is {error:.1e} away from ours"
    return right


def bench(
    results: Results,
    workload: Workload,
    dtype: str,
    rounds: int,
    *,
    backward: bool,
    impls: Sequence[str],
    peers: Sequence[str] = tuple(PEERS),
) -> None:
    """Adds the records of one workload, and prints its lines."""
    data = Data(workload, getattr(torch, dtype))
    clock = ColdClock()
    with torch.no_grad():
        contenders = ours(data, impls)
        theirs, missing = available(data, peers)
        expected = [_tensor(next(iter(contenders.values()))())]
        contenders |= agreeing(theirs, missing, expected)
        peak = {name: peak_mb(contender) for name, contender in contenders.items()}
        notes = {
            name: f"{host_us(contender, 20):.0f} us of the host a call"
            for name, contender in contenders.items()
            if name.startswith("ikbo")
        }
        graphs = captured(contenders, notes)
        timings = interleaved(graphs, rounds, clock=clock, sample_ms=0.0)
        del graphs
    traffic = data.traffic
    results.add(
        workload.name,
        timings,
        direction="fwd",
        dtype=dtype,
        flops=data.flops,
        traffic=traffic,
        peak_mb=peak,
        notes=notes,
    )
    show(workload.name, "fwd", timings, data.flops, traffic, missing)
    if backward:
        graphs, missing = kept(contenders, data)
        expected = list(_grads(next(iter(graphs.values()))()))
        graphs = agreeing(graphs, missing, expected)
        timings = interleaved(graphs, max(5, rounds // 2), clock=clock, sample_ms=0.0)
        flops = 2.5 * data.flops
        results.add(workload.name, timings, direction="bwd", dtype=dtype, flops=flops)
        show(workload.name, "bwd", timings, flops, None, missing)
    del data, contenders
    gc.collect()
    torch.cuda.empty_cache()


def captured(contenders: dict[str, Contender], notes: dict[str, str]) -> dict[str, Contender]:
    """Each as a graph, so that no time of the host counts; what cannot be one is noted."""
    found: dict[str, Contender] = {}
    for name, contender in contenders.items():
        try:
            found[name] = graphed(contender)
        except Exception:  # whatever a stranger's kernel raises
            torch.cuda.synchronize()
            found[name] = contender
            notes[name] = "eager: it cannot be captured"
    return found


def kept(
    contenders: dict[str, Contender], data: Data
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The backward of each contender that has one."""
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name, contender in contenders.items():
        if not _tensor(contender()).requires_grad:
            missing[name] = "it has no backward"
            continue
        forward = lambda contender=contender: _tensor(contender())  # noqa: E731
        try:
            found[name] = graphed_backward(forward, data.leaves, data.grad)
        except Exception as error:  # whatever a stranger's kernel raises
            torch.cuda.synchronize()
            missing[name] = f"it raised {error!r:.160}"
    return found, missing


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _grads(result: object) -> tuple[Tensor, ...]:
    assert isinstance(result, tuple)
    return result


def show(
    name: str,
    direction: str,
    timings: dict[str, Timing],
    flops: float,
    traffic: int | None,
    missing: dict[str, str],
) -> None:
    """One line a contender; ratios are medians of the rounds'."""
    first = next(iter(timings.values()))
    print(f"{name} {direction}", flush=True)
    for who, timing in timings.items():
        ms = timing.median_ms
        bandwidth = "" if traffic is None else f"{traffic / ms / 1e6:7.0f} GB/s"
        ratio = first.times_faster_than(timing)
        print(
            f"  {who:20} {ms:9.4f} ms {flops / ms / 1e9:7.1f} TFLOP/s {bandwidth}"
            f"  {ratio:5.2f} of our time",
            flush=True,
        )
    for who, reason in missing.items():
        print(f"  {who:20} {reason}", flush=True)


def main() -> None:
    default = list(workloads())
    known = sweeps() | workloads()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="*", help=f"default: all of {', '.join(default)}")
    parser.add_argument("--sweeps", action="store_true", help=f"run {', '.join(sweeps())}")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--impl", nargs="*", choices=OURS, default=OURS, help="ours; default all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=tuple(PEERS))
    parser.add_argument("--topic", default="attention", help="begins the name of the results file")
    options = parser.parse_args()
    peers = ("flash-attn-4", "flashinfer-python", "fbtriton")
    results = Results(options.topic, device_name(), peers=peers)
    results.ceilings = cuda_ceilings()
    print(results.device, results.ceilings, flush=True)
    for name in options.workload or (sweeps() if options.sweeps else default):
        bench(
            results,
            known[name],
            options.dtype,
            options.rounds,
            backward=not options.forward_only,
            impls=options.impl,
            peers=options.peers,
        )
        path = results.write()
    print(f"written to {path}")


if __name__ == "__main__":
    main()
