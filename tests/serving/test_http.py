"""Real HTTP: right scores, clear errors, and neighbours that do not notice."""

import io
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving.cases import SIGNATURE, Held, oracle, request, runner, until
from serving.servers import ask, in_thread, score

from ikbo_tree.serving import PrometheusMetrics, Signature, TreeBatcher, codec

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

TYPE = {"Content-Type": codec.JSON}


@pytest.fixture(scope="module")
def port():
    wide = {"user": 64, "vendor": 256, "item": 1024}
    batcher = TreeBatcher(runner(capacity=wide), metrics=PrometheusMetrics())
    with in_thread(batcher, max_body=1 << 20) as port:
        yield port


def test_json_and_bytes(port):
    asked = request(1, users=2)
    status, headers, body = ask(port, "POST", "/score", codec.to_json(asked), TYPE)
    assert (status, headers["content-type"]) == (200, codec.JSON)
    assert json.loads(body) == {"scores": oracle(asked).tolist(), "level": "item"}
    types = {"Content-Type": codec.NPZ, "Accept": codec.NPY}
    status, headers, body = ask(port, "POST", "/score", codec.to_npz(asked), types)
    assert (status, headers["content-type"]) == (200, codec.NPY)
    np.testing.assert_array_equal(np.load(io.BytesIO(body)), oracle(asked))


def test_a_body_that_a_thread_decodes(port):
    asked = request(1, users=60, vendors=4, items=30)
    body = codec.to_npz(asked)
    assert len(body) > 32 << 10
    assert score(port, asked) == (200, oracle(asked).tolist())


def test_a_log_comes_back_in_its_order(port):
    asked = request(4)
    vendors = len(asked.counts["item"])
    vendor = np.repeat(np.arange(vendors), asked.counts["item"])
    order = np.random.default_rng(0).permutation(len(vendor))
    inputs = {name: x.tolist() for name, x in asked.inputs.items()}
    for name in ("item_x", "word"):
        inputs[name] = asked.inputs[name][order].tolist()
    content = {
        "log": {"user": [9] * len(order), "vendor": vendor[order].tolist(), "item": order.tolist()},
        "rows": {"user": [9], "vendor": list(range(vendors))},
        "inputs": inputs,
    }
    status, _, body = ask(port, "POST", "/score", json.dumps(content), TYPE)
    assert status == 200
    assert json.loads(body)["scores"] == oracle(asked)[order].tolist()


def test_other_paths(port):
    assert json.loads(ask(port, "GET", "/healthz")[2]) == {"healthy": True}
    assert Signature.from_json(json.loads(ask(port, "GET", "/model")[2])) == SIGNATURE
    assert b"ikbo_tree_answers_total" in ask(port, "GET", "/metrics")[2]
    assert ask(port, "GET", "/nothing")[0] == 404
    assert ask(port, "GET", "/score")[0] == 404


BAD = {
    "no json": (b"{", TYPE, 400),
    "no archive": (b"PK", {"Content-Type": codec.NPZ}, 400),
    "another type": (b"x", {"Content-Type": "text/xml"}, 400),
    "nan": (codec.to_json(request(1)).replace(b"[[", b"[[NaN, ", 1), TYPE, 400),
    "counts": (b'{"counts": {"vendor": [-1], "item": []}, "inputs": {}}', TYPE, 400),
    "absurd": (
        b'{"counts": {"vendor": [4000000000000000000], "item": []}, "inputs": {}}',
        TYPE,
        413,
    ),
    "too long": (b" " * (2 << 20), TYPE, 413),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_why(port, name):
    body, headers, expected = BAD[name]
    status, _, answer = ask(port, "POST", "/score", body, headers)
    assert status == expected
    told = json.loads(answer)
    assert told["error"]
    assert told["argument"]


def test_good_requests_among_bad_ones(port):
    """All at once, so that they share batches."""
    good = [request(seed, users=1 + seed % 3, key=seed % 4) for seed in range(80)]
    bad = list(BAD.values())

    def one(number):
        if number % 3:
            body, headers, expected = bad[number % len(bad)]
            return ask(port, "POST", "/score", body, headers)[0] == expected
        asked = good[number // 3]
        return score(port, asked) == (200, oracle(asked).tolist())

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(240)))


def test_overload_is_told_to_come_back():
    held = Held()
    batcher = TreeBatcher(held, max_queued_requests=2, max_delay_s=0.0)
    with in_thread(batcher) as port, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(score, port, request(0))]
        assert held.entered.wait(10)
        answers += [pool.submit(score, port, request(seed)) for seed in (1, 2)]
        until(lambda: batcher.waiting == 2)
        status, headers, body = ask(port, "POST", "/score", codec.to_json(request(3)), TYPE)
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert json.loads(body)["type"] == "OverloadedError"
        assert ask(port, "GET", "/healthz")[0] == 200
        held.go.set()
        for seed, answer in enumerate(answers):
            assert answer.result(10) == (200, oracle(request(seed)).tolist())


def test_a_caller_that_hangs_up_does_no_harm():
    held = Held()
    batcher = TreeBatcher(held, max_delay_s=0.0)
    with in_thread(batcher) as port, ThreadPoolExecutor(2) as pool:
        first = pool.submit(score, port, request(0))
        assert held.entered.wait(10)
        with pytest.raises(TimeoutError):
            score(port, request(1), timeout=0.2)
        last = pool.submit(score, port, request(2))
        until(lambda: batcher.waiting >= 1)
        held.go.set()
        assert first.result(10) == (200, oracle(request(0)).tolist())
        assert last.result(10) == (200, oracle(request(2)).tolist())


def test_a_server_that_shuts_down_answers_what_it_has_accepted():
    held = Held()
    batcher = TreeBatcher(held, max_delay_s=0.0)
    with ThreadPoolExecutor(4) as pool:
        with in_thread(batcher) as port:
            answers = [pool.submit(score, port, request(0))]
            assert held.entered.wait(10)
            answers += [pool.submit(score, port, request(seed)) for seed in (1, 2)]
            until(lambda: batcher.waiting == 2)
            pool.submit(lambda: (time.sleep(0.5), held.go.set()))
        for seed, answer in enumerate(answers):
            assert answer.result(10) == (200, oracle(request(seed)).tolist())
    assert not batcher.healthy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_is_seen_and_nobody_hangs():
    def die(merged):
        raise SystemExit

    held = Held(on_run=die)
    batcher = TreeBatcher(held, max_delay_s=0.0)
    with in_thread(batcher) as port, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(score, port, request(0))]
        assert held.entered.wait(10)
        answers += [pool.submit(score, port, request(seed)) for seed in (1, 2, 3)]
        until(lambda: batcher.waiting == 3)
        held.go.set()
        assert {answer.result(10)[0] for answer in answers} == {500}
        assert ask(port, "GET", "/healthz")[0] == 503
        assert score(port, request(9))[0] == 503
