"""`ikbo-tree bench-serve`, small; and that load is what it says."""

import json
import sys
import time
from concurrent.futures import Future

import numpy as np
import pytest
from serving.cases import oracle, request, runner
from serving.servers import in_thread

from ikbo_tree.cli import main
from ikbo_tree.serving import OverloadedError, TreeBatcher
from ikbo_tree.serving.open_loop import GIVEN_UP, HttpTarget, open_loop


class Slow:
    """Blocks whoever asks it; refuses every fourth, loses every fifth."""

    def __init__(self, seconds=0.0, moody=False):
        self.seconds, self.moody, self.asked = seconds, moody, 0

    def submit(self, request):
        time.sleep(self.seconds)
        self.asked += 1
        future = Future()
        if self.moody and self.asked % 4 == 0:
            raise OverloadedError("no")
        if not self.moody or self.asked % 5:
            future.set_result(None)
        return future


def test_latency_counts_from_when_a_request_was_due():
    load = open_loop(Slow(0.02), [request(0)], rate=200, seconds=0.5)
    assert load.quantile(0.99) > 500  # four times as long as there was time


def test_arrivals_are_poisson():
    target = Slow()
    load = open_loop(target, [request(0)], rate=2000, seconds=1.0, seed=3)
    assert target.asked == load.statuses[200]
    assert abs(target.asked - 2000) < 5 * 2000**0.5


def test_refused_and_lost_requests_are_counted():
    load = open_loop(Slow(moody=True), [request(0)], rate=400, seconds=0.3, patience_s=0.2)
    assert load.statuses.keys() == {200, 503, GIVEN_UP}
    assert len(load.latencies_ms) == load.statuses[200]


def test_over_http():
    pytest.importorskip("uvicorn")
    asked = [request(seed) for seed in range(5)]
    with in_thread(TreeBatcher(runner())) as port:
        target = HttpTarget("127.0.0.1", port, connections=4)
        load = open_loop(target, asked, rate=100, seconds=0.5)
        answer = target.submit(asked[1]).result(10)
        target.close()
    assert load.statuses.keys() == {200}
    assert len(answer) > len(oracle(asked[1])) * 4


def test_the_command(monkeypatch, tmp_path, capsys):
    pytest.importorskip("prometheus_client")
    results = tmp_path / "r.json"
    arguments = ["bench-serve", "--rates", "20,40", "--seconds", "0.3", "--requests", "6"]
    arguments += ["--ratio", "8", "--out", str(tmp_path), "--json", str(results), "--cache-mb", "4"]
    monkeypatch.setattr(sys, "argv", ["ikbo-tree", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    assert "one a call" in capsys.readouterr().out
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads(results.read_text())
    who = [record["who"] for record in content["records"]]
    assert set(who) == {
        "ikbo-torch",
        "materialised+broadcast",
        "ikbo-torch, one request a call",
        "ikbo-torch, users cached",
    }
    for record in content["records"]:
        order = [record[name] for name in ("p10_ms", "median_ms", "p90_ms", "p99_ms")]
        assert order == sorted(order)
        assert record["workload"].startswith("serve-r8-q")
    differences = content["checks"]["largest_difference"]
    assert 0 < max(differences.values()) < 1e-5
    assert np.isfinite(content["checks"]["throughput"]["ikbo-torch"])
    host_us = content["checks"]["host_us_a_batch"]
    assert len(host_us) == 4
    assert min(host_us.values()) > 0
