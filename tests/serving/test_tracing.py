"""Spans of a request's way, read from OpenTelemetry's own in-memory exporter."""

import itertools
import sys
import time
from collections import Counter

import pytest
from serving.cases import STAGED, Held, known, oracle, request, runner, staged, until
from serving.servers import ask, in_thread, over_grpc

from ikbo_tree.cli import main
from ikbo_tree.serving import (
    BadRequestError,
    OpenTelemetrySpans,
    ScoringError,
    TreeBatcher,
    codec,
    grpc_service,
    save,
)
from ikbo_tree.serving.options import Options
from ikbo_tree.serving.tracing import hook

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

STAGES = ["queue", "merge", "copy", "launch", "split"]


class Traces:
    """A provider that keeps what it is given."""

    def __init__(self, sampler=sampling.ALWAYS_ON):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = OpenTelemetrySpans(self.provider)

    def finished(self, requests):
        """Spans by name, once all of these requests have theirs."""
        until(lambda: len([x for x in self.named() if x[0] == "split"]) >= requests)
        until(lambda: len([x for x in self.named() if x[0] == "score"]) >= requests)
        return self.named()

    def named(self):
        return [
            (span.name.removeprefix("ikbo_tree."), span)
            for span in self.exporter.get_finished_spans()
        ]


def children(spans, of):
    """By name, in order of time, spans whose parent this is."""
    mine = [
        (name, span)
        for name, span in spans
        if span.parent is not None and span.parent.span_id == of.context.span_id
    ]
    return sorted(mine, key=lambda x: x[1].start_time)


def test_every_request_of_a_batch_has_its_stages():
    traces = Traces()
    held = Held()
    before = time.time_ns()
    with TreeBatcher(held, spans=traces.spans, max_delay_s=0.0) as batcher:
        first = batcher.submit(request(0))
        assert held.entered.wait(10)
        futures = [batcher.submit(request(seed)) for seed in (1, 2)]
        held.go.set()
        assert all(future.result(10) for future in (first, *futures))
        spans = traces.finished(3)
    after = time.time_ns()
    scores = [span for name, span in spans if name == "score"]
    assert len(spans) == 3 * (1 + len(STAGES))
    for score in scores:
        assert score.parent is None
        assert score.attributes["ikbo_tree.status"] == 200
        found = children(spans, score)
        assert [name for name, _ in found] == STAGES
        for (_, left), (_, right) in itertools.pairwise(found):
            assert left.end_time <= right.start_time + 1000  # two clocks, to a microsecond
        for _, span in found:
            assert span.context.trace_id == score.context.trace_id
            assert before <= span.start_time <= span.end_time <= after
    launches = [span for name, span in spans if name == "launch"]
    assert sorted(x.attributes["ikbo_tree.requests"] for x in launches) == [1, 2, 2]
    rows = {x.attributes["ikbo_tree.rows.item"] for x in launches}
    assert rows == {len(oracle(request(0))), sum(len(oracle(request(s))) for s in (1, 2))}
    # The second batch waited for the first, and both of its requests say so.
    assert len({(x.start_time, x.end_time) for x in launches}) == 2


def test_coarse_parts_have_a_stage():
    traces = Traces()
    made = runner(staged(), STAGED, cache_bytes=1000)
    with TreeBatcher(made, spans=traces.spans) as batcher:
        for _ in range(2):
            batcher.score(known(1, 7, 1), 10)
        spans = traces.finished(2)
    hits = [x.attributes["ikbo_tree.coarse_hits.person"] for name, x in spans if name == "launch"]
    assert hits == [0, 1]
    score = next(span for name, span in spans if name == "score")
    names = [name for name, _ in children(spans, score)]
    assert names == ["queue", "merge", "coarse", "copy", "launch", "split"]


def test_a_request_that_is_cut_has_stages_for_each_batch_and_waits_once():
    traces = Traces()
    with TreeBatcher(runner(), spans=traces.spans) as batcher:
        batcher.score(request(5, users=10, vendors=5, items=8), 10)
        until(lambda: Counter(name for name, _ in traces.named())["score"] == 1)
        until(lambda: len({Counter(n for n, _ in traces.named())[x] for x in STAGES[1:]}) == 1)
        counts = Counter(name for name, _ in traces.named())
    assert counts["queue"] == counts["score"] == 1
    assert counts["launch"] > 2


def test_errors():
    traces = Traces()

    def fail(merged):
        raise RuntimeError("a kernel failed")

    held = Held(on_run=fail)
    held.go.set()
    bad = request(1)
    bad.inputs["item_x"][0] = float("nan")
    with TreeBatcher(held, spans=traces.spans) as batcher:
        for asked, error in ((bad, BadRequestError), (request(1), ScoringError)):
            with pytest.raises(error):
                batcher.score(asked, 10)
        until(lambda: Counter(name for name, _ in traces.named())["score"] == 2)
    scores = [span for name, span in traces.named() if name == "score"]
    assert [x.attributes["ikbo_tree.status"] for x in scores] == [400, 500]
    assert all(x.status.status_code is trace.StatusCode.ERROR for x in scores)
    assert "nan" in scores[0].events[0].attributes["exception.message"]
    assert [name for name, _ in traces.named() if name != "score"] == ["queue", "merge"]


def test_a_cancelled_request_ends_its_span():
    traces = Traces()
    held = Held()
    with TreeBatcher(held, spans=traces.spans, max_delay_s=0.0) as batcher:
        batcher.submit(request(0))
        assert held.entered.wait(10)
        assert batcher.submit(request(1)).cancel()
        held.go.set()
        until(lambda: Counter(name for name, _ in traces.named())["score"] == 2)
    statuses = [x.attributes["ikbo_tree.status"] for name, x in traces.named() if name == "score"]
    assert sorted(statuses) == [200, 499]


def test_the_caller_s_span_is_the_parent():
    traces = Traces()
    tracer = traces.provider.get_tracer("test")
    with TreeBatcher(runner(), spans=traces.spans) as batcher:
        with tracer.start_as_current_span("caller") as caller:
            batcher.score(request(1), 10)
        spans = traces.finished(1)
    assert [name for name, _ in children(spans, caller)] == ["score"]


@pytest.mark.parametrize("items", [4, 3000], ids=["inline", "in a thread"])
def test_over_http_the_header_names_the_parent(items):
    pytest.importorskip("uvicorn")
    traces = Traces()
    made = runner(capacity={"user": 4, "vendor": 16, "item": 1 << 14})
    with in_thread(TreeBatcher(made, spans=traces.spans)) as port:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"Content-Type": codec.NPZ, "traceparent": parent}
        body = codec.to_npz(request(1, items=items))
        assert (len(body) > 32 << 10) == (items > 1000)
        assert ask(port, "POST", "/score", body, headers)[0] == 200
        assert ask(port, "POST", "/score", body, {"Content-Type": codec.NPZ})[0] == 200
        spans = traces.finished(2)
    first, second = [span for name, span in spans if name == "score"]
    assert f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    assert f"{first.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert first.kind is trace.SpanKind.SERVER
    assert second.parent is None


def test_over_grpc_the_metadata_name_the_parent():
    grpc = pytest.importorskip("grpc")
    traces = Traces()
    with (
        over_grpc(TreeBatcher(runner(), spans=traces.spans)) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        metadata = [("traceparent", parent), ("x-bin", b"\xff")]
        grpc_service.client(channel)(codec.to_npz(request(1)), timeout=10, metadata=metadata)
        spans = traces.finished(1)
    (score,) = [span for name, span in spans if name == "score"]
    assert f"{score.parent.span_id:016x}" == "b7ad6b7169203331"


def test_what_is_not_sampled_leaves_nothing():
    traces = Traces(sampling.ParentBased(sampling.ALWAYS_OFF))
    tracer = Traces().provider.get_tracer("test")
    assert traces.spans.arrived() is None
    with TreeBatcher(runner(), spans=traces.spans) as batcher:
        batcher.score(request(0), 10)
        with tracer.start_as_current_span("sampled"):
            batcher.score(request(1), 10)
        spans = traces.finished(1)
    assert Counter(name for name, _ in spans) == dict.fromkeys(["score", *STAGES], 1)


CALLS = []


def set_up():
    """As an operator's module has it."""
    CALLS.append(1)


def test_the_hook_of_options(tmp_path):
    pytest.importorskip("prometheus_client")
    from serving.cases import CAPACITY, SIGNATURE, Toy

    save(Toy().eval(), SIGNATURE, request(3, users=3), tmp_path / "toy.pt2")
    options = Options(tmp_path / "toy.pt2", (CAPACITY,), tracing=f"{__name__}:set_up")
    with options.batcher() as batcher:
        assert isinstance(batcher.spans, OpenTelemetrySpans)
        assert batcher.score(request(1), 10)
    assert CALLS


@pytest.mark.parametrize("name", ["json", "json:", "json:nothing", "no_such_module_x:f"])
def test_wrong_hooks(name, monkeypatch, capsys):
    with pytest.raises((ValueError, ImportError)):
        hook(name)
    arguments = ["serve", "--model", __file__, "--capacity", "user=1", "--engine", "uvicorn"]
    monkeypatch.setattr(sys, "argv", ["ikbo-tree", *arguments, "--tracing", name])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "--tracing" in capsys.readouterr().err
