"""Real gRPC calls, without Ray; with it they are in `test_processes`."""

import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving.cases import Held, oracle, request, runner, until
from serving.servers import over_grpc

from ikbo_tree.serving import TreeBatcher, codec, grpc_service

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")
pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def call():
    batcher = TreeBatcher(runner(capacity={"user": 64, "vendor": 256, "item": 1024}))
    with (
        over_grpc(batcher, max_body=1 << 20) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield grpc_service.client(channel)


def test_both_kinds_of_bodies(call):
    asked = request(1, users=2)
    scores = np.load(io.BytesIO(call(codec.to_npz(asked), timeout=10)))
    np.testing.assert_array_equal(scores, oracle(asked))
    answer = json.loads(call(codec.to_json(asked), timeout=10))
    assert answer == {"scores": oracle(asked).tolist(), "level": "item"}


def test_many_at_once(call):
    asked = [request(seed, users=1 + seed % 3, key=seed % 4) for seed in range(60)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda x: call(codec.to_npz(x), timeout=20), asked)
        for x, answer in zip(asked, answers, strict=True):
            np.testing.assert_array_equal(np.load(io.BytesIO(answer)), oracle(x))


BAD = {
    "nothing": (b"", "body"),
    "no json": (b"{", "body"),
    "no archive": (b"PK", "body"),
    "counts": (b'{"counts": {"vendor": [-1], "item": []}, "inputs": {}}', "counts"),
    "too long": (b"{" * (2 << 20), "body"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_why(call, name):
    body, argument = BAD[name]
    with pytest.raises(grpc.RpcError) as error:
        call(body, timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details().startswith(argument)


def test_overload_and_deadlines():
    held = Held()
    batcher = TreeBatcher(held, max_queued_requests=2, max_delay_s=0.0)
    with (
        over_grpc(batcher) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        ThreadPoolExecutor(4) as pool,
    ):
        call = grpc_service.client(channel)

        def ask(seed, timeout=20):
            return pool.submit(call, codec.to_npz(request(seed)), timeout=timeout)

        first = ask(0)
        assert held.entered.wait(10)
        waiting, late = ask(1), ask(2, timeout=1.0)
        until(lambda: batcher.waiting == 2)
        with pytest.raises(grpc.RpcError) as error:
            ask(3).result(10)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert int(dict(error.value.trailing_metadata())["retry-after"]) >= 1
        with pytest.raises(grpc.RpcError) as error:
            late.result(10)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # The server learns of it a moment later.
        until(lambda: any(part.caller.gone for part in list(batcher._queue)))
        held.go.set()
        for seed, answer in enumerate((first, waiting)):
            np.testing.assert_array_equal(
                np.load(io.BytesIO(answer.result(10))), oracle(request(seed))
            )
    assert held.batches == [1, 1]  # who gave up was taken out of the queue
