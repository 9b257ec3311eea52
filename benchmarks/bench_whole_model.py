"""A whole three-level ranker in the ways that broadcasts are avoided or paid for.

`python benchmarks/bench_whole_model.py` writes benchmarks/results/whole-model_<device>.json: the
ads model of tests/models at its frozen widths, inference, 64 items and four vendors a user. All
contenders share parameters and take turns; on a GPU each is a captured graph, with a cold L2.

    system-broadcast   all inputs arrive copied to the items; the copies are not timed
    flat               the model as it is: inputs at their own levels, copied on the device
    roo-split          request-only network at the users, everything else at the items (ROO)
    level-split        each level's own network at its own rows
    rewritten          what `ikbo_tree.rewrite` made of it: inputs at their own levels, a tree

Both splits copy what their coarse networks give out, keys and values included, to the items before
the first interaction. `<who>-compiled` is the same under torch.compile.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from harness import ROOT, Clock, Contender, Results, cpu_ceilings, cpu_name, interleaved, wall_clock
from torch import Tensor, nn

import ikbo_tree as ikbo

sys.path.append(str(ROOT / "tests"))

from models.ads import Attention, ThreeLevelAds
from models.sizes import SIZES, TINY, Sizes
from models.zoo import ZOO

RATIO, VENDORS = 64, 4
"""Items and vendors of a user."""
ITEMS = {"cpu": 128, "cuda": 1024}
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Of results, relative to the largest: sums of thousands of terms in another order."""

Keys = tuple[Tensor, Tensor, Tensor]
"""Keys and values [rows, heads, events, head dim], and a mask [rows, events]."""


class SystemBroadcast(nn.Module):
    """The model whose inputs have been copied by whoever sends them."""

    def __init__(self, model: ThreeLevelAds) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        """All inputs at the items."""
        same = slice(None)
        scores: Tensor = self.model(**inputs, vendor_to_user=same, item_to_vendor=same)
        return scores


class Split(nn.Module):
    """The model cut where rows of different levels first meet.

    Args:
        model: whose layers it takes.
        vendors: vendors have a network of their own; otherwise they belong to the items, as ROO
            knows requests alone.
    """

    def __init__(self, model: ThreeLevelAds, vendors: bool) -> None:
        super().__init__()
        self.m = model
        self.vendors = vendors

    def forward(
        self,
        user_x: Tensor,
        history_ids: Tensor,
        history_mask: Tensor,
        vendor_x: Tensor,
        catalogue_ids: Tensor,
        catalogue_mask: Tensor,
        item_x: Tensor,
        item_ids: Tensor,
        vendor_to_user: Tensor,
        item_to_vendor: Tensor,
    ) -> Tensor:
        """Inputs as the model's own."""
        m, item_to_user = self.m, vendor_to_user[item_to_vendor]
        if not self.vendors:
            vendor_x = vendor_x[item_to_vendor]
            catalogue_ids, catalogue_mask = (
                x[item_to_vendor] for x in (catalogue_ids, catalogue_mask)
            )
        user = m.user_tower(user_x)[item_to_user]
        history = m.history_encoder(history_ids)
        interests = [
            _copied(_keys(attention, history, history_mask), item_to_user)
            for attention in (m.vendor_interest, m.item_interest)
        ]
        vendor = m.vendor_tower(vendor_x)
        events = m.catalogue_encoder(catalogue_ids)
        catalogue = _keys(m.item_in_catalogue, events, catalogue_mask)
        if self.vendors:
            vendor, catalogue = vendor[item_to_vendor], _copied(catalogue, item_to_vendor)
        item = m.item_tower(torch.cat([item_x, m.ads(item_ids)], dim=-1))
        features = [
            user,
            vendor,
            item,
            m.affinity(torch.cat([user, vendor], dim=-1)),
            _asked(m.vendor_interest, vendor, interests[0]),
            _asked(m.item_interest, item, interests[1]),
            _asked(m.item_in_catalogue, item, catalogue),
        ]
        scores: Tensor = m.head(torch.cat(features, dim=-1))
        return scores


def _keys(attention: Attention, events: Tensor, mask: Tensor) -> Keys:
    """What depends on a history alone."""
    k, v = (
        x.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for x in attention.kv(events).chunk(2, dim=-1)
    )
    return k, v, mask


def _copied(keys: Keys, index: Tensor) -> Keys:
    k, v, mask = keys
    return k[index], v[index], mask[index]


def _asked(attention: Attention, query: Tensor, keys: Keys) -> Tensor:
    """[rows, width] from the keys of each row."""
    k, v, mask = keys
    q = attention.q(query).unflatten(-1, (attention.heads, -1)).unsqueeze(2)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    out: Tensor = attention.out(attended.flatten(1))
    return out


def tree_of(items: int) -> ikbo.BroadcastTree:
    """Users with `RATIO` items each."""
    users = max(1, items // RATIO)
    counts = {"vendor": [VENDORS] * users, "item": [RATIO // VENDORS] * (VENDORS * users)}
    return ikbo.BroadcastTree.from_counts(counts, root="user")


def contenders(
    sizes: Sizes, tree: ikbo.BroadcastTree, dtype: torch.dtype, compiled: bool
) -> tuple[dict[str, Contender], dict[str, str]]:
    """By name, and notes on some; the tree's device is everything's."""
    entry = ZOO["ads"]
    model = entry.build(sizes).to(tree.device, dtype)
    own = entry.inputs(sizes, tree, 0, dtype)
    copied = {
        name: own[name][tree.ancestors("item", of=level).long()]
        for name, level in entry.levels.items()
    }
    begin = time.perf_counter()
    fast, report = ikbo.rewrite(
        model,
        own,
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        tree=tree,
        check_seconds=0,
    )
    seconds = time.perf_counter() - begin
    before, after = (
        [sum(cost[i] for cost in costs.values()) for i in range(2)]
        for costs in (report.before, report.after)
    )
    note = (
        f"rewritten in {seconds:.1f} s; counted: {before[0] / 1e9:.1f} -> {after[0] / 1e9:.1f}"
        f" GFLOP, {before[1] / 1e6:.0f} -> {after[1] / 1e6:.0f} MB"
    )
    compact = {name: own[name] for name in entry.levels}
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "system-broadcast": (SystemBroadcast(model), copied),
        "flat": (model, own),
        "roo-split": (Split(model, vendors=False), own),
        "level-split": (Split(model, vendors=True), own),
        "rewritten": (fast, {**compact, "tree": tree}),
    }
    if compiled:
        for who, (run, given) in list(models.items()):
            models[f"{who}-compiled"] = (torch.compile(run, dynamic=False), given)
    calls = {who: functools.partial(run, **given) for who, (run, given) in models.items()}
    return calls, {"rewritten": note}


def agreeing(calls: dict[str, Contender], tolerance: float) -> None:
    """No speed without right results."""
    expected: Any = calls["flat"]()
    for who, call in calls.items():
        found: Any = call()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < tolerance:
            raise AssertionError(f"{who} is off by {error:.1e}")


def captured(who: str, call: Contender, notes: dict[str, str]) -> Contender:
    """As a graph; what asks the device for sizes stays as it is, and a note says so."""
    from cuda_timing import graphed

    try:
        return graphed(call)
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = f"no CUDA graph: {str(error).splitlines()[0]:.80}"
        notes[who] = "; ".join(filter(None, [notes.get(who), reason]))
        return call


def bench(
    results: Results,
    sizes: Sizes,
    tree: ikbo.BroadcastTree,
    dtype: str,
    *,
    rounds: int,
    compiled: bool,
    clock: Clock,
) -> None:
    """Adds the records of one dtype, and prints its lines."""
    torch.compiler.reset()
    calls, notes = contenders(sizes, tree, getattr(torch, dtype), compiled)
    peak: dict[str, float] = {}
    with torch.inference_mode():
        agreeing(calls, TOLERANCE[dtype])
        if tree.device.type == "cuda":
            from cuda_timing import peak_mb

            peak = {who: peak_mb(call) for who, call in calls.items()}
            calls = {who: captured(who, call, notes) for who, call in calls.items()}
        timings = interleaved(calls, rounds, clock=clock, sample_ms=0.0)
    for who, timing in timings.items():
        faster = timing.times_faster_than(timings["system-broadcast"])
        notes[who] = "; ".join(filter(None, [f"{faster:.3f}x system-broadcast", notes.get(who)]))
        print(f"{dtype} {who:26} {timing.median_ms:9.4f} ms  {notes[who]}", flush=True)
    results.add(
        f"model-ads-r{RATIO}", timings, direction="fwd", dtype=dtype, peak_mb=peak, notes=notes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--items", type=int, help=f"default {ITEMS}")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", nargs="*", choices=TOLERANCE, default=dtypes)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compiled", action="store_true", help="not under torch.compile")
    parser.add_argument("--tiny", action="store_true", help="least widths; nothing is written")
    options = parser.parse_args()
    clock: Clock = wall_clock
    if options.device == "cuda":
        from cuda_timing import ColdClock, cuda_ceilings, device_name

        results = Results("whole-model", device_name())
        results.ceilings, clock = cuda_ceilings(), ColdClock()
    else:
        torch.set_num_threads(1)
        results = Results("whole-model", f"{cpu_name()}, 1 threads")
        results.ceilings = cpu_ceilings()
    tree = tree_of(options.items or ITEMS[options.device]).to(options.device)
    sizes = (TINY if options.tiny else SIZES)["ads"]
    for dtype in options.dtype:
        bench(
            results,
            sizes,
            tree,
            dtype,
            rounds=options.rounds,
            compiled=not options.no_compiled,
            clock=clock,
        )
        if not options.tiny:
            print(f"written to {results.write()}", flush=True)


if __name__ == "__main__":
    main()
