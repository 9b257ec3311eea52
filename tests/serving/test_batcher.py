"""`TreeBatcher`: right scores for everyone, and an answer for everyone whatever happens."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from serving.cases import CAPACITY, SIGNATURE, Held, Peers, oracle, request, runner, until

from ikbo_tree.serving import (
    BadRequestError,
    LateError,
    Metrics,
    OverloadedError,
    ScoringError,
    StoppedError,
    TooLargeError,
    TreeBatcher,
    check,
)

MARK = 7777.0
"""A feature by which a test's model knows the request that it shall fail on."""


def marked(asked):
    x = asked.inputs["user_x"].clone()
    x[:] = MARK
    return replace(asked, inputs={**asked.inputs, "user_x": x})


def fail_on_mark(merged):
    if any((part.inputs["user_x"] == MARK).any() for part in merged.parts):
        raise RuntimeError("a kernel failed")


def die_on_mark(merged):
    if any((part.inputs["user_x"] == MARK).any() for part in merged.parts):
        raise SystemExit


def size(asked):
    return check(asked, SIGNATURE).nbytes


def assert_right(scores, asked):
    np.testing.assert_array_equal(scores.values.numpy(), oracle(asked))
    assert scores.level == "item"


def test_many_threads():
    asked = [request(seed, users=1 + seed % 2, key=seed % 5) for seed in range(120)]
    with (
        TreeBatcher(runner(capacity={"user": 16, "vendor": 48, "item": 96})) as batcher,
        ThreadPoolExecutor(8) as pool,
    ):
        for x, scores in zip(asked, pool.map(batcher.score, asked), strict=True):
            assert_right(scores, x)


def test_waiting_requests_are_one_batch():
    held = Held()
    with TreeBatcher(held, max_delay_s=0.0) as batcher:
        first = batcher.submit(request(0))
        assert held.entered.wait(10)
        asked = [request(seed) for seed in range(1, 4)]
        futures = [batcher.submit(x) for x in asked]
        held.go.set()
        for future, x in zip(futures, asked, strict=True):
            assert_right(future.result(10), x)
        assert first.result(10).neighbours == 0
        assert futures[0].result().neighbours == 2
    assert held.batches == [1, 3]


def test_a_batch_starts_when_its_oldest_request_has_waited():
    with TreeBatcher(runner(), max_delay_s=0.2) as batcher:
        begin = time.perf_counter()
        assert batcher.score(request(1), 10).queue_s >= 0.19
        assert time.perf_counter() - begin < 2
        # Or when there is no room for more: the last of these need not wait.
        futures = [batcher.submit(request(seed, users=2)) for seed in range(8)]
        assert futures[0].result(10).queue_s < 0.15


def test_max_requests_limits_a_batch():
    held = Held()
    with TreeBatcher(held, max_requests=2) as batcher:
        futures = [batcher.submit(request(seed, vendors=1, items=1)) for seed in range(4)]
        held.go.set()
        assert all(future.result(10) for future in futures)
    assert max(held.batches) == 2


def test_a_full_batch_does_not_wait():
    with TreeBatcher(runner(), max_requests=2, max_delay_s=20.0) as batcher:
        futures = [batcher.submit(request(seed, vendors=1, items=1)) for seed in range(2)]
        assert all(future.result(10) for future in futures)


def test_requests_that_come_at_once_are_one_batch():
    held = Held()
    held.go.set()
    asked = [request(seed, vendors=1, items=1) for seed in range(4)]
    asked.insert(2, replace(request(9), counts={}))
    with TreeBatcher(held, max_delay_s=0.0) as batcher:
        for _ in range(5):
            futures = batcher.submit_all(asked)
            with pytest.raises(BadRequestError):
                futures.pop(2).result(10)
            for future, x in zip(futures, asked[:2] + asked[3:], strict=True):
                assert_right(future.result(10), x)
    assert held.batches == [4] * 5


def test_a_request_larger_than_capacity():
    big, after = request(5, users=10, vendors=5, items=8, key=3), request(6)
    with TreeBatcher(runner()) as batcher:
        futures = [batcher.submit(x) for x in (big, after)]
        assert_right(futures[0].result(10), big)
        assert_right(futures[1].result(10), after)
        assert batcher.waiting == 0


def test_one_root_row_that_can_not_be_cut_is_refused():
    signature = replace(SIGNATURE, independent=False)
    with TreeBatcher(runner(Peers().eval(), signature)) as batcher:
        with pytest.raises(TooLargeError):
            batcher.submit(request(2, items=60))
        assert len(batcher.score(request(1), 10).values)


def test_bad_input_leaves_its_neighbours_alone():
    held = Held()
    bad = request(1)
    bad.inputs["item_x"][0] = float("nan")
    with TreeBatcher(held) as batcher:
        good = [request(seed) for seed in range(4)]
        futures = [batcher.submit(x) for x in good[:2]]
        with pytest.raises(BadRequestError):
            batcher.submit(bad)
        futures += [batcher.submit(x) for x in good[2:]]
        held.go.set()
        for future, x in zip(futures, good, strict=True):
            assert_right(future.result(10), x)


def test_a_failing_model_fails_the_guilty_request_alone():
    held = Held(on_run=fail_on_mark)
    asked = [request(0), marked(request(1)), request(2)]
    with TreeBatcher(held, max_delay_s=0.05) as batcher:
        futures = [batcher.submit(x) for x in asked]
        held.go.set()
        with pytest.raises(ScoringError, match="a kernel failed"):
            futures[1].result(10)
        assert_right(futures[0].result(10), asked[0])
        assert_right(futures[2].result(10), asked[2])
        assert batcher.healthy


def test_a_part_that_fails_fails_its_request_once():
    big = marked(request(5, users=10, vendors=5, items=8))
    held = Held(on_run=fail_on_mark)
    held.go.set()
    with TreeBatcher(held) as batcher:
        with pytest.raises(ScoringError):
            batcher.score(big, 10)
        assert_right(batcher.score(request(1), 10), request(1))
        until(lambda: batcher.waiting == 0)


def test_a_full_queue_refuses():
    held = Held()
    with TreeBatcher(held, max_queued_requests=3, max_delay_s=0.0) as batcher:
        futures = [batcher.submit(request(0))]
        assert held.entered.wait(10)
        futures += [batcher.submit(request(seed)) for seed in range(1, 4)]
        with pytest.raises(OverloadedError) as error:
            batcher.submit(request(9))
        assert error.value.status == 503
        assert error.value.retry_after_s > 0
        held.go.set()
        assert all(future.result(10) for future in futures)
        assert batcher.score(request(9), 10)


def test_bytes_of_the_queue_are_bounded():
    held = Held()
    with TreeBatcher(held, max_queued_bytes=3000, max_delay_s=0.0) as batcher:
        with pytest.raises(TooLargeError):
            batcher.submit(request(1, users=40))
        futures = [batcher.submit(request(0))]
        assert held.entered.wait(10)
        while batcher._queued_bytes + size(request(1)) <= 3000:
            futures.append(batcher.submit(request(1)))
        assert 3 < len(futures) < 40
        with pytest.raises(OverloadedError):
            batcher.submit(request(1))
        held.go.set()
        assert all(future.result(10) for future in futures)
        until(lambda: batcher._queued_bytes == 0)


def test_who_waited_too_long_is_given_up():
    held = Held()
    with TreeBatcher(held, timeout_s=0.05, max_delay_s=0.0) as batcher:
        first = batcher.submit(request(0))
        assert held.entered.wait(10)
        late = batcher.submit(request(1))
        time.sleep(0.1)
        held.go.set()
        assert first.result(10)
        with pytest.raises(LateError):
            late.result(10)


def test_a_cancelled_request_is_not_scored():
    held = Held()
    with TreeBatcher(held, max_delay_s=0.0) as batcher:
        first = batcher.submit(request(0))
        assert held.entered.wait(10)
        gone, kept = batcher.submit(request(1)), batcher.submit(request(2))
        assert gone.cancel()
        held.go.set()
        assert first.result(10)
        assert_right(kept.result(10), request(2))
        with pytest.raises(CancelledError):
            gone.result(10)
    assert held.batches == [1, 1]


def test_a_caller_that_waits_no_longer_takes_its_request_back():
    held = Held()
    with TreeBatcher(held, max_delay_s=0.0) as batcher:
        first = batcher.submit(request(0))
        assert held.entered.wait(10)
        with pytest.raises(TimeoutError):
            batcher.score(request(1), timeout_s=0.01)
        held.go.set()
        assert first.result(10)
    assert held.batches == [1]


def test_asyncio():
    asked = [request(seed) for seed in range(20)]

    async def all_of_them(batcher):
        return await asyncio.gather(*(batcher.score_async(x) for x in asked))

    with TreeBatcher(runner()) as batcher:
        for x, scores in zip(asked, asyncio.run(all_of_them(batcher)), strict=True):
            assert_right(scores, x)


@pytest.mark.parametrize("drain", [True, False])
def test_closing(drain):
    held = Held()
    batcher = TreeBatcher(held, max_delay_s=0.0)
    first = batcher.submit(request(0))
    assert held.entered.wait(10)
    waiting = [batcher.submit(request(seed)) for seed in range(1, 4)]
    closing = threading.Thread(target=batcher.close, kwargs={"drain": drain})
    closing.start()
    until(lambda: not batcher.healthy)
    with pytest.raises(StoppedError):
        batcher.submit(request(5))
    held.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert first.result(0)
    for seed, future in enumerate(waiting, start=1):
        if drain:
            assert_right(future.result(0), request(seed))
        else:
            with pytest.raises(StoppedError):
                future.result(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_in_a_batch_answers_everyone():
    held = Held(on_run=die_on_mark)
    batcher = TreeBatcher(held, max_delay_s=0.02)
    futures = [batcher.submit(x) for x in (request(0), marked(request(1)))]
    assert held.entered.wait(10)
    futures += [batcher.submit(request(seed)) for seed in range(2, 9)]
    held.go.set()
    for future in futures:
        with pytest.raises(ScoringError, match="worker ended"):
            future.result(10)
    until(lambda: not batcher._worker.is_alive())
    assert not batcher.healthy
    with pytest.raises(StoppedError):
        batcher.submit(request(1))


class Seen(Metrics):
    def __init__(self):
        self.batches, self.statuses, self.queue = [], [], []

    def waiting(self, requests, nbytes):
        self.queue.append((requests, nbytes))

    def batch(self, facts):
        self.batches.append(facts)

    def answered(self, status):
        self.statuses.append(status)


def test_metrics_are_told_of_everything():
    seen = Seen()
    held = Held(on_run=fail_on_mark)
    held.go.set()
    bad = request(1)
    bad.inputs["item_x"][0] = float("inf")
    with TreeBatcher(held, metrics=seen) as batcher:
        batcher.score(request(0, key=1), 10)
        for asked in (bad, marked(request(2))):
            with pytest.raises((BadRequestError, ScoringError)):
                batcher.score(asked, 10)
    assert seen.statuses == [200, 400, 500]
    (facts,) = seen.batches
    assert facts.rows["item"] == len(oracle(request(0)))
    assert len(facts.queue_s) == 1
    assert facts.queue_s[0] >= 0
    assert facts.bytes_not_moved > 0
    assert min(facts.merge_s, facts.run_s, facts.split_s) > 0
    assert seen.queue[0][0] == 1
    assert seen.queue[-1] == (0, 0)


def test_prometheus():
    parser = pytest.importorskip("prometheus_client.parser")
    from ikbo_tree.serving import PrometheusMetrics

    asked = [request(seed) for seed in range(5)]
    for labels in ({}, {"replica": "a"}):
        metrics = PrometheusMetrics(labels)
        with TreeBatcher(runner(), metrics=metrics) as batcher:
            for x in asked:
                batcher.score(x, 10)
        text, kind = metrics.text()
        assert kind.startswith("text/plain")
        samples = {}
        for family in parser.text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                own = {k: v for k, v in sample.labels.items() if k not in labels}
                assert labels.items() <= sample.labels.items()
                samples[sample.name, *own.values()] = sample.value
        assert samples["ikbo_tree_answers_total", "200"] == 5
        assert samples["ikbo_tree_queue_seconds_count",] == 5
        items = sum(len(oracle(x)) for x in asked)
        assert samples["ikbo_tree_batch_rows_sum", "item"] == items
        assert samples["ikbo_tree_waiting_requests",] == 0
        assert samples["ikbo_tree_bytes_not_moved_total",] > 0
        assert CAPACITY["user"] >= 1
