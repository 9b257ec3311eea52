"""The reproduction of the article: items name what exists, the page says what results files say."""

import json
import re
import subprocess

import attention_data
import bench_lce
import harness
import pytest
import render_checks
import reproduce
import typer
from reproduction import counted, figures, report, tables
from reproduction.contenders import CONTENDERS, contender
from reproduction.items import ITEMS, topics_of
from reproduction.results import Results, series, verdict
from reproduction.runs import RUNS
from reproduction.spec import Cell, Claim, Intensity, Panel
from typer.testing import CliRunner

from ikbo_tree.cli import reproduce as command

ROOT = harness.ROOT
HERE = Results(harness.RESULTS, reproduce.DEVICE)
EVERY_ITEM = pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)


def cells(item):
    for panel in item.panels:
        for _, workload in panel.points:
            for who in panel.who:
                yield panel.topics, Cell("", workload, who, panel.direction, panel.field)
    for claim in item.claims:
        for cell in (cell for pair in claim.ratios for cell in pair if isinstance(cell, Cell)):
            yield (cell.topic,), cell


def known(topic):
    """Workloads that the command of a results file can measure."""
    if topic.startswith("lce"):
        return {*bench_lce.WORKLOADS, "lce-b1024-r64"}
    if topic.startswith("attention"):
        return {*attention_data.workloads(), *attention_data.sweeps()}
    if topic == "self-attention":
        return {r["workload"] for r in HERE.file(topic)["records"]}
    if topic == "numerics":
        return {
            f"num-{op}-r{r}" for op in ("linear", "lce", "attn") for r in (10, 100, 1000, 10_000)
        }
    if topic == "invariance":
        return {f"inv-{op}" for op in ("linear", "lce", "attn")}
    if topic == "whole-model":
        return {"model-ads-r64"}
    assert topic == "counters"
    return {"lce-b1024-r70-p16"}


@EVERY_ITEM
def test_it_names_what_is_measured(item):
    assert item.article
    assert item.here
    for topics, cell in cells(item):
        assert set(topics) <= set(RUNS)
        assert cell.workload in set().union(*map(known, topics)), cell
        assert cell.who == "stages_kernel" or contender(cell.who), cell


def declared_missing(cell):
    """There is no file, or it says that the peer was not installed."""
    content = HERE.file(cell.topic)
    if content is None:
        return True
    return cell.who.startswith("fa4") and content["versions"].get("flash-attn-4") is None


@EVERY_ITEM
def test_claims_have_their_records_or_say_why_not(item):
    for claim in item.claims:
        for cell in (cell for pair in claim.ratios for cell in pair if isinstance(cell, Cell)):
            assert (HERE.found(cell) is None) == declared_missing(cell), cell


@EVERY_ITEM
def test_a_figure_is_drawn_of_what_is_there(item):
    drawn = [panel for panel in item.panels if panel.kind not in ("records", "roofline")]
    for panel in drawn:
        if any(HERE.file(topic) for topic in panel.topics) and "sweeps" not in panel.topics[0]:
            assert series(HERE, panel), panel.title


def test_commands_run_scripts_that_exist():
    for run in RUNS.values():
        assert (ROOT / "benchmarks" / run.script).is_file()
        assert bool(run.modules or run.programs) == bool(run.needs)
    assert {topic for item in ITEMS.values() for topic in item.topics} == set(RUNS)


def test_what_is_checked_in_is_up_to_date():
    folder = ROOT / "docs/reproduction"
    page = (folder / "report.html").read_text()
    assert report.without_plots(report.page(HERE)) == report.without_plots(page)
    shown = {item.id for item in ITEMS.values() if figures.draw(HERE, item)}
    for ending in ("svg", "png"):
        assert {path.stem for path in folder.glob(f"*.{ending}")} == shown
    assert page.count("<svg") == len(shown)


def made_up(folder):
    """A results file for each topic, with a number in every cell that an item asks for."""
    found = {}
    for item in ITEMS.values():
        for topics, cell in cells(item):
            for topic in topics:
                found.setdefault(topic, {})[cell.workload, cell.who, cell.direction] = None
    for row, kernel, *_ in figures.COUNTED_BY_NCU:
        found["counters"][row, kernel, None] = None
    for topic, keys in found.items():
        records = [
            {
                "workload": workload, "who": who, "direction": direction, "dtype": dtype,
                "median_ms": 1 + i % 7, "tflops": 100.0, "gbps": 2000.0, "rms": 2e-4,
                "worst": 1e-3, "differing": i % 3, "elements": 50,
                "dram_read_mb": 600.0, "dram_write_mb": 200.0, "warps_pct": 18.0, "l2_pct": 80.0,
            }
            for i, (workload, who, direction) in enumerate(keys)
            for dtype in ("float16", "bfloat16", "float32")
        ]  # fmt: skip
        content = {
            "device": "A Card", "date": "2026-01-02", "command": "python <b>", "records": records,
            "versions": {"torch": "9.9", "cuda": None},
            "ceilings": {"copy_gbps": 4000.0, "matmul_tflops": 800.0},
        }  # fmt: skip
        (folder / f"{topic}_a-card.json").write_text(json.dumps(content))
    return Results(folder, "a-card")


def test_all_of_it_is_drawn_and_stands_alone(tmp_path):
    results = made_up(tmp_path)
    written = {path.name for path in report.write(results, tmp_path / "out")}
    plotted = {i for i, item in ITEMS.items() if {p.kind for p in item.panels} != {"records"}}
    assert written == {"report.html", *(f"{i}.{end}" for i in plotted for end in ("svg", "png"))}
    page = (tmp_path / "out/report.html").read_text()
    assert "A Card" in page
    assert "python &lt;b&gt;" in page
    assert "`" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)
    assert not re.findall(r'(?:src|href)="(?!#)|https?://|@import', page)
    assert {mark.source for mark in figures.marks(results)} == {"counted", "NCU"}
    assert "torch 9.9" in (tmp_path / "out/lce-steps.svg").read_text()


def test_rendering_gives_the_same_bytes(tmp_path):
    results = made_up(tmp_path)
    item = ITEMS["lce-sweeps"]
    first, second = (
        figures.write(figures.draw(results, item), tmp_path / str(turn), "plot") for turn in "ab"
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_without_results_each_item_says_so(tmp_path):
    page = report.page(Results(tmp_path, "no-card"))
    assert "<svg" not in page
    for run in RUNS.values():
        assert f"{run.topic}_no-card.json" in page
        assert run.script in page
    counted_here = {"roofline"}  # its claims are arithmetic
    for name in ITEMS:
        (badge,) = re.findall(rf'href="#{name}">.*?badge (\w+)"', page, re.S)
        assert badge == ("holds" if name in counted_here else "missing")


@pytest.mark.parametrize(
    ("options", "value", "expected"),
    [
        ({"at_least": 4.0}, 3.7, "holds"),  # nine tenths of the gain
        ({"at_least": 4.0}, 3.69, "less"),
        ({"at_least": 4.0}, 1.0, "no"),
        ({"at_least": 0.97, "exactly": True}, 0.96, "no"),
        ({"at_least": 621, "unit": " TFLOP/s"}, 620, "no"),
        ({"at_most": 0, "unit": ""}, 0, "holds"),
        ({"at_most": 0, "unit": ""}, 1, "no"),
        ({"near": 356}, 340, "holds"),
        ({"near": 356}, 380, "no"),
        ({"at_least": 4.0}, None, "missing"),
    ],
)
def test_verdicts(options, value, expected):
    assert verdict(Claim("", "", (), **options), value) == expected


def test_values_of_claims(tmp_path):
    records = [
        {"workload": "w", "who": who, "direction": "fwd", "dtype": "float16", "median_ms": ms}
        for who, ms in (("a", 6.0), ("b", 2.0), ("c", 3.0))
    ]
    (tmp_path / "t_d.json").write_text(json.dumps({"records": records}))
    results = Results(tmp_path, "d")
    a, b, c, missing = (Cell("t", "w", who) for who in "abcd")
    assert results.measured(Claim("", "", [(a, b), (a, c)])) == 2
    assert results.measured(Claim("", "", [(a, b), (a, c)], pick="most")) == 3
    assert results.measured(Claim("", "", [(a, None)])) == 6
    assert results.measured(Claim("", "", [(a, b), (a, missing)])) is None
    panel = Panel("", "lines", ("no", "t"), ((1, "w"), (2, "x")), ("b", "d"), over="a")
    assert series(results, panel) == {"b": [(3.0, "t"), None]}
    assert tables.of_panel(results, panel)[0].rows == [["b", "3", ""]]


def test_intensities_are_those_of_the_article():
    """Appendix 2: 2 B M K N / 2 (M K + B K N + B M N); appendix 9: 4 q S D / 2 D (2 S + 2 q)."""
    B, M, K, N = 1024, 433, 2044, 256
    product = B * M * K * N / (M * K + B * K * N + B * M * N)
    assert counted.cost("lce-b1024-r70", "op").intensity == pytest.approx(product, rel=1e-6)
    name, q, S = "attn-s1024-r70-n64-h2-d128", 64, 1024
    assert counted.cost(name, "op").intensity == pytest.approx(q * S / (S + q), rel=0.01)
    shared = q * S / (S / 70 + q)
    assert counted.cost(name, "tree").intensity == pytest.approx(shared, rel=0.01)
    assert HERE.value(Intensity(name, "tree")) == counted.cost(name, "tree").intensity


def test_topics_in_the_order_of_their_runs():
    assert topics_of(["backward", "lce-steps"]) == ["lce", "lce-published", "attention"]
    assert reproduce.chosen(HERE, ["numerics"], False) == ["numerics"]
    everything = reproduce.chosen(HERE, [], True)
    assert everything == list(RUNS)
    missing = reproduce.chosen(HERE, [], False)
    assert missing == [topic for topic in everything if HERE.file(topic) is None]


def test_what_cannot_run_is_left_out_and_what_fails_is_named(monkeypatch, capsys):
    ran = []

    def run(command, cwd):
        ran.append(command)
        return subprocess.CompletedProcess(command, int("bench_numerics.py" in command[1]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reproduce.measure(["lce-published", "numerics", "lce-depth"]) == ["numerics"]
    assert "lce-published: left out, it needs the published kernels" in capsys.readouterr().out
    assert [one[1].rpartition("/")[2] for one in ran] == ["bench_numerics.py", "bench_lce.py"]
    assert ran[1][2:] == RUNS["lce-depth"].arguments.split()


def invoke(*arguments):
    app = typer.Typer()
    app.command()(command.reproduce)
    return CliRunner().invoke(app, arguments)


def test_it_needs_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "CHECKOUT", tmp_path)
    result = invoke("--list")
    assert result.exit_code == 2
    assert "needs a checkout of ikbo-tree" in " ".join(
        re.sub("[│╭╮╰╯─]", "", result.output).split()
    )


def test_options_are_passed_on(monkeypatch, tmp_path):
    passed = []

    def run(arguments, check):
        passed.extend(arguments)
        return subprocess.CompletedProcess(arguments, 3)

    monkeypatch.setattr(subprocess, "run", run)
    result = invoke("--only", "numerics", "--only", "depth", "--all", "--out", str(tmp_path))
    assert result.exit_code == 3
    script = str(ROOT / "benchmarks/reproduce.py")
    assert passed[1:] == [script, "--all", "--only", "numerics", "depth", "--out", str(tmp_path)]


def test_listing_names_items_and_files(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reproduce.py", "--list"])
    reproduce.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(ITEMS)
    assert any(re.match(r" +lce_nvidia-h200.json +there +about", line) for line in lines)


def test_measuring_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reproduce.py"])
    monkeypatch.setattr(reproduce, "is_hopper", lambda: False)
    with pytest.raises(SystemExit):
        reproduce.main()
    assert "measuring needs a Hopper GPU" in capsys.readouterr().err


def test_tables_of_errors_and_bits():
    records = [
        {"workload": "num-lce-r10", "who": who, "direction": d, "dtype": "float16", "rms": rms}
        for d in ("fwd", "bwd")
        for who, rms in (("rounded", 2e-4), ("flat", 3.125e-4))
    ]
    text = "\n".join(render_checks.numerics({"records": records}))
    assert text.count("| num-lce-r10 | float16 |") == 2
    assert re.search(r"\| +200 \| +312 \|", text)
    records = [
        {"workload": "inv-lce", "who": "flat", "dtype": "float16", "differing": 1234,
         "elements": 5000, "worst": 0.001},
    ]  # fmt: skip
    text = "\n".join(render_checks.invariance({"records": records}))
    assert re.search(r"\| +1,234 \| +5,000 \| +0.001 \|", text)


def test_contenders_look_different_in_one_plot():
    for item in ITEMS.values():
        for panel in item.panels:
            looks = [tuple(contender(who)[:2]) for who in panel.who if "-compiled" not in who]
            assert len(looks) == len(set(looks)), panel.title
    assert all(one.text for one in CONTENDERS.values())
