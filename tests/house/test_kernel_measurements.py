"""What benchmarks of Hopper's kernels make of what they measure, from results made up here."""

import csv
import io
import json
import random

import ablate_kernels
import numpy as np
import profile_kernels
import pytest
import records
import render
import render_kernels
import timeline
import torch
import trace_kernels
from harness import Results, Timing
from trace_kernels import BEGIN, BUCKETS, CONSUMERS, MULTIPLIED, STORED, WAITING, Event, Interval

KERNELS = [
    (workload, who, f"void {pattern.split('|')[0]}_something")
    for workload, kernels in profile_kernels.EXPECTED
    for who, pattern in kernels.items()
]
CONTEXT = ["ID", "Process ID", "Kernel Name", "Device"]
UNITS = {"gpu__time_duration.sum": "nsecond", "launch__shared_mem_per_block": "Kbyte/block"}


def log_of(values, kernels=KERNELS):
    """ncu's log, kernels in any order."""
    out = io.StringIO()
    out.write("==PROF== Connected to process 7\n==PROF== Disconnected\n")
    lines = [[str(i), "7", name, "0", *values.values()] for i, (_, _, name) in enumerate(kernels)]
    random.Random(0).shuffle(lines)
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow([*CONTEXT, *values])
    writer.writerow(["", "", "", "", *(UNITS.get(name, "") for name in values)])
    writer.writerows(lines)
    return out.getvalue().splitlines()


VALUES = {
    "gpu__time_duration.sum": "360,480",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "71.25",
    "gpc__cycles_elapsed.max": "567000",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "n/a",
    "lts__t_sectors_op_read.sum": "99500000",
    "launch__shared_mem_per_block": "230.4",
}


def test_counters_of_a_log():
    found = profile_kernels.counted(log_of(VALUES))
    assert [(r["workload"], r["who"], r["kernel"]) for r in found] == KERNELS
    for record in found:
        assert record["duration_us"] == 360.5
        assert record["tensor_pct"] == 71.25
        assert record["sm_mcycles"] == 0.567, "the second metric, where the first was not counted"
        assert record["l2_read_mb"] == 3184
        assert record["shared_kib"] == 225
        assert record["dram_pct"] is None
        assert record["registers"] is None


def test_logs_that_are_not_what_was_launched():
    with pytest.raises(ValueError, match=r"no table.*Connected"):
        profile_kernels.counted(["==PROF== Connected"])
    with pytest.raises(ValueError, match=f"expected {len(KERNELS)} kernels"):
        profile_kernels.counted(log_of(VALUES, KERNELS[:-1]))
    with pytest.raises(ValueError, match="expected stages_kernel of"):
        profile_kernels.counted(log_of(VALUES, [KERNELS[-1], *KERNELS[1:]]))


def test_ncu_counts_what_is_launched(tmp_path):
    command = profile_kernels.command(tmp_path / "log.csv")
    (pattern,) = (word.removeprefix("regex:") for word in command if word.startswith("regex:"))
    for _, kernels in profile_kernels.EXPECTED:
        assert all(name in pattern for name in kernels.values())
    assert command[command.index("--clock-control") + 1] == "none"
    assert "--metrics" not in profile_kernels.command(tmp_path / "log.csv", metrics=False)


def put(log, event):
    """As the kernels' instructions do."""
    value = (event.clock << 4 | event.kind) % 2**32
    slot = event.clock // 8 % BUCKETS
    log[event.program, event.consumer, slot] = value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize("start", [5, 2**28 - 300, 3 * 2**28 + 8 * BUCKETS - 200])
def test_a_log_is_read_in_the_order_of_the_clock(start):
    """Also where the clock, or the ring of buckets, begins anew."""
    log = torch.zeros(2, CONSUMERS, BUCKETS, dtype=torch.int32)
    events = [
        Event(1, consumer, clock + 9 * consumer, kind)
        for consumer in range(2)
        for clock, kind in ((0, BEGIN + 3), (250, MULTIPLIED), (400, STORED), (408, BEGIN + 1))
    ]
    for event in events:
        put(log, event._replace(clock=start + event.clock))
    found = trace_kernels.events(log)
    assert found == events
    assert trace_kernels.intervals(found) == [
        Interval(1, consumer, *rest)
        for consumer in range(2)
        for rest in (
            ("main loop, pair", 9 * consumer, 250 + 9 * consumer),
            ("epilogue", 250 + 9 * consumer, 400 + 9 * consumer),
            (WAITING, 400 + 9 * consumer, 408 + 9 * consumer),
        )
    ]


def trace(rng):
    """Intervals of two programs' consumers without gaps."""
    phases = ["main loop, pair", "epilogue", WAITING, "softmax", "scores"]
    found = []
    for program in (0, 3):
        for consumer in (0, 1):
            at = rng.randrange(50)
            for _ in range(rng.randint(1, 12)):
                end = at + rng.randint(1, 60)
                found.append(Interval(program, consumer, rng.choice(phases), at, end))
                at = end
    return found


@pytest.mark.parametrize("seed", range(5))
def test_shares_by_counting_cycles(seed):
    found = trace(random.Random(seed))
    busy = {
        (i.program, i.consumer, t)
        for i in found
        if i.phase in ("main loop, pair", "scores")
        for t in range(i.start, i.end)
    }
    *phases, program = timeline.summary(found)
    total = sum(i.end - i.start for i in found)
    assert {r["phase"] for r in phases} == {i.phase for i in found}
    for record in phases:
        mine = [i for i in found if i.phase == record["phase"]]
        cycles = [(i.program, 1 - i.consumer, t) for i in mine for t in range(i.start, i.end)]
        assert record["count"] == len(mine)
        assert record["median"] == round(np.median([i.end - i.start for i in mine]))
        assert record["share"] == pytest.approx(len(cycles) / total, abs=1e-4)
        beside = sum(cycle in busy for cycle in cycles) / len(cycles)
        assert record["beside"] == pytest.approx(beside, abs=1e-4)
    spans = {p: [i for i in found if i.program == p] for p in (0, 3)}
    lengths = [max(i.end for i in s) - min(i.start for i in s) for s in spans.values()]
    assert program["phase"] == "program"
    assert program["beside"] == pytest.approx(
        len({(p, t) for p, _, t in busy}) / sum(lengths), abs=1e-4
    )


def test_a_picture_is_part_of_one_program():
    found = trace(random.Random(1))
    shown = timeline.picture(found, shown=100)
    assert shown["program"] in (0, 3)
    assert shown["intervals"]
    for _, phase, start, end in shown["intervals"]:
        assert phase != WAITING
        assert 0 <= start < end <= 100


def test_pages_of_results(tmp_path, monkeypatch):
    """Each topic's table has its numbers, and traces have pictures."""
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "KERNELS", tmp_path / "kernels")
    results = Results("ablation", "Some GPU", ceilings={"copy_gbps": 4000, "matmul_tflops": 800})
    shipped, slower = Timing((1.0, 2.0)), Timing((1.5, 2.5))
    note = ablate_kernels.ratios(slower, shipped)
    assert note == "1.375 (1.275 to 1.475)"
    for workload, direction in (("lce-b1024-r70-p16", "fwd"), ("attn-s512", "bwd")):
        timings = {"shipped": shipped, "slower": slower}
        results.add(workload, timings, direction=direction, notes={"slower": note})
    results.write(tmp_path)
    records.write("counters", "Some GPU", profile_kernels.counted(log_of(VALUES)), tmp_path)
    found = trace(random.Random(2))
    lines = [{"workload": "lce-b1024-r70-p32", **line} for line in timeline.summary(found)]
    pictures = {"lce-b1024-r70-p32": timeline.picture(found, 100)}
    records.write("timeline", "Some GPU", lines, tmp_path, pictures=pictures)
    page = render.KERNELS / "page.md"
    page.parent.mkdir()
    monkeypatch.setattr(render, "ROOT", tmp_path)
    names = ("ablation_some-gpu", "counters_some-gpu", "timeline_some-gpu")
    page.write_text("".join(f"<!-- results: {n} lce -->\n<!-- end -->\n" for n in names))
    text = render.document(page.read_text(), page)
    assert render.document(text, page) == text
    assert note in text
    assert "ridge between this run's two ceilings is 200 FLOP/B" in text
    assert "attn" not in text, "only workloads that were asked for"
    assert "71.2" in text
    (picture,) = render.plot(names[2], json.loads((tmp_path / f"{names[2]}.json").read_text()))
    assert f"({picture.name})" in text
    assert picture.read_text().startswith("<?xml")
    assert render.plot(names[0], {}) == render.plot(names[1], {}) == []


def test_rooflines_by_hand():
    """Bytes and operations of two workloads, written out; the published 60 and 833 FLOP/B."""
    (lce,) = (row for row in render_kernels._compression() if row[0] == "lce-b1024-r70")
    flops = 2 * 433 * 256 * (15 * 1178 + 1024 * 866)
    moved = 2 * (433 * (1178 + 866) + 256 * (15 * 1178 + 1024 * 866 + 1024 * 433))
    copied = 2 * 433 * 256 * 1024 * 2044
    assert lce[1:] == (
        flops, moved, (copied, 2 * (433 * 2044 + 256 * 1024 * (2044 + 433))),
    )  # fmt: skip
    (row,) = (row for row in render_kernels._attention() if "s1024-r70" in row[0])
    _, flops, moved, copied = row
    assert round(flops / moved) == 833
    assert round(copied[0] / copied[1]) == 60
