"""`ikbo-tree serve` as users start it, and what callers see when processes die."""

import io
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving.cases import SIGNATURE, Toy, oracle, request, until
from serving.servers import ask, free_port, in_process, score

from ikbo_tree.cli import main
from ikbo_tree.serving import codec, save

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

CAPACITY = "user=16,vendor=64,item=256"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "toy.pt2"
    save(Toy().eval(), SIGNATURE, request(3, users=3), path)
    return path


def asked_until_it_ends(port, seconds):
    """Scores of request after request, each checked; statuses, 0 for a broken connection."""
    statuses = Counter()
    end = time.monotonic() + seconds
    seed = 0
    while time.monotonic() < end:
        seed += 1
        try:
            status, scores = score(port, request(seed), timeout=20)
        except TimeoutError:
            statuses["hung"] += 1
            break
        except OSError:
            statuses[0] += 1
            time.sleep(0.05)
            continue
        if status == 200:
            assert scores == oracle(request(seed)).tolist()
        statuses[status] += 1
    return statuses


@pytest.mark.slow
def test_a_killed_server_leaves_no_caller_hanging(file):
    with (
        in_process(file, "--capacity", CAPACITY, "--delay-ms", "300") as (process, port),
        ThreadPoolExecutor(8) as pool,
    ):
        assert score(port, request(1)) == (200, oracle(request(1)).tolist())
        callers = [pool.submit(asked_until_it_ends, port, 2.0) for _ in range(8)]
        time.sleep(0.8)  # in the middle of a batch's wait
        process.kill()
        found = [caller.result(30) for caller in callers]
    assert all(statuses[200] and statuses[0] for statuses in found), found
    assert not any(statuses["hung"] for statuses in found)


@pytest.mark.slow
def test_sigterm_drains(file):
    with (
        in_process(file, "--capacity", CAPACITY, "--delay-ms", "700") as (process, port),
        ThreadPoolExecutor(4) as pool,
    ):
        answers = [pool.submit(score, port, request(seed)) for seed in range(4)]
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        for seed, answer in enumerate(answers):
            assert answer.result(20) == (200, oracle(request(seed)).tolist())
        assert process.wait(20) is not None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--capacity", "user=1"], "at least 1 row"),
        (["--capacity", "user"], "level=rows"),
        (["--capacity", CAPACITY, "--engine", "apache"], "must be one of"),
        (["--capacity", CAPACITY + ",shop=3"], "'shop'"),
    ],
)
def test_wrong_options(file, arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["ikbo-tree", "serve", "--model", str(file), "--engine", "uvicorn", *arguments]
    )
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_ray(file):
    """Two replicas, one killed under load: nobody hangs, and it comes back; then SIGTERM drains."""
    pytest.importorskip("ray.serve")
    grpc_port = free_port()
    arguments = ["--capacity", CAPACITY, "--delay-ms", "150", "--replicas", "2"]
    arguments += ["--grpc-port", str(grpc_port)]
    with (
        in_process(file, *arguments, engine="ray") as (process, port),
        ThreadPoolExecutor(8) as pool,
    ):
        assert score(port, request(1)) == (200, oracle(request(1)).tolist())
        assert ask(port, "POST", "/score", b"{", {"Content-Type": "application/json"})[0] == 400
        assert_scores_over_grpc(grpc_port, pool)
        until(lambda: len(replicas(port)) == 2, 30)
        victim = min(replicas(port))
        callers = [pool.submit(asked_until_it_ends, port, 4.0) for _ in range(8)]
        time.sleep(1.0)
        os.kill(victim, signal.SIGKILL)
        total = sum((caller.result(60) for caller in callers), Counter())
        assert not total["hung"], total
        assert total[200] > 0.9 * total.total(), total
        until(lambda: len(replicas(port) - {victim}) == 2, 30)
        answers = [pool.submit(score, port, request(seed)) for seed in range(4)]
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        for seed, answer in enumerate(answers):
            assert answer.result(20) == (200, oracle(request(seed)).tolist())
        assert process.wait(30) == 0


def assert_scores_over_grpc(port, pool):
    grpc = pytest.importorskip("grpc")
    from ikbo_tree.serving import grpc_service

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = grpc_service.client(channel)
        asked = [request(seed, key=seed % 2) for seed in range(20)]
        answers = [pool.submit(call, codec.to_npz(x), timeout=20) for x in asked]
        for x, answer in zip(asked, answers, strict=True):
            scores = np.load(io.BytesIO(answer.result(30)))
            np.testing.assert_array_equal(scores, oracle(x))
        with pytest.raises(grpc.RpcError) as error:
            call(b"{}", timeout=20)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "counts" in error.value.details()


def replicas(port):
    """Process ids of the replicas that answer."""
    found = set()
    for _ in range(40):
        status, _, body = ask(port, "GET", "/metrics")
        if status == 200:
            found |= {
                int(float(line.split()[-1]))
                for line in body.decode().splitlines()
                if line.startswith("ikbo_tree_process_id{")
            }
    return found
