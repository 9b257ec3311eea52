"""Mixed good and bad load on Ray Serve while replicas are killed: a command, not a test.

    python tests/serving/soak.py --minutes 10 --log soak.log

Prints one line an interval and exits with 1 if any score was wrong, any caller was left hanging,
any bad request was answered with scores, or memory grew. Scores are integers, so they are either
right or wrong; every request is another one, so another caller's scores are wrong. Users come back
with new versions, and coarse results are kept, so those of an old version are wrong, too, and that
none were found fails as well. Every other caller asks over gRPC.
"""

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.cases import STAGED, known, oracle, request, staged
from serving.servers import ask, free_port, score

from ikbo_tree.serving import codec, grpc_service, save

CAPACITY = {"user": 16, "vendor": 64, "item": 256}
GROWTH = 1.3
"""Most that a process's memory may grow by after its first 20 seconds."""


def bad_body(seed):
    asked = request(seed)
    kind = seed % 4
    if kind == 0:
        asked.inputs["user_x"][0, 0] = float("nan")
    elif kind == 1:
        asked.counts["item"][0] = -1
    elif kind == 2:
        asked.counts["vendor"][0] = 1 << 40
    else:
        asked.inputs["word"] = torch.full_like(asked.inputs["word"], 99)
        if not len(asked.inputs["word"]):
            asked.counts["vendor"][0] = 1 << 40
    return codec.to_npz(asked)


class Caller(threading.Thread):
    """Asks again and again, a bad request every fourth time."""

    def __init__(self, port, grpc_port, number, until):
        super().__init__(daemon=True)
        self.port, self.number, self.until, self.seen = port, number, until, Counter()
        self.grpc_port = grpc_port if number % 2 else None

    def run(self):
        turn = 0
        while time.monotonic() < self.until:
            turn += 1
            seed = turn * 1000 + self.number
            self.seen["asked"] += 1
            self.seen[self.outcome(seed, turn)] += 1

    def outcome(self, seed, turn):
        bad = turn % 4 == 0
        if turn % 3:
            asked = known(seed, key=turn % 50, version=turn // 100)
        else:
            asked = request(seed, users=1 + turn % 2, key=turn % 50)
        try:
            if self.grpc_port is not None:
                status, scores = self.over_grpc(bad_body(seed) if bad else codec.to_npz(asked))
            elif bad:
                headers = {"Content-Type": codec.NPZ}
                status, _, scores = ask(self.port, "POST", "/score", bad_body(seed), headers)
            else:
                status, scores = score(self.port, asked)
        except TimeoutError:
            return "hung"
        except OSError:
            time.sleep(0.05)
            return "broken"
        if bad:
            return "bad accepted" if status == 200 else f"bad {status}"
        if status == 200:
            return "right" if scores == oracle(asked).tolist() else "wrong"
        time.sleep(0.05)
        return f"refused {status}"

    def over_grpc(self, body):
        """Status, by name if it is an error, and scores; a connection a call, as over HTTP."""
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            try:
                answer = grpc_service.client(channel)(body, timeout=30)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from None
                return error.code().name, None
        return 200, np.load(io.BytesIO(answer)).tolist()


def memory_mb(pid):
    """Resident size of a process; None if it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def replicas(port):
    """Replicas that answer: by process id the rows that their caches had so far."""
    found = {}
    for _ in range(12):
        try:
            status, _, body = ask(port, "GET", "/metrics", timeout=5)
        except OSError:
            continue
        values = {}
        for line in body.decode().splitlines() if status == 200 else []:
            name, _, value = line.rpartition(" ")
            if name.startswith("ikbo_tree_process_id{"):
                values["pid"] = int(float(value))
            elif name.startswith("ikbo_tree_coarse_rows_total{") and 'outcome="hit"' in name:
                values["hits"] = int(float(value))
        if "pid" in values:
            found[values["pid"]] = values.get("hits", 0)
    return found


def proxies():
    """Process ids of Ray's HTTP proxies."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::ProxyActor" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kill-every-s", type=float, default=60)
    parser.add_argument("--interval-s", type=float, default=10)
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--log", type=Path, default=Path("soak.log"))
    options = parser.parse_args()

    import ray
    from ray import serve

    from ikbo_tree.serving import ray_app
    from ikbo_tree.serving.options import Options

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    with tempfile.TemporaryDirectory() as folder, options.log.open("w") as log:
        file, port, grpc_port = Path(folder) / "toy.pt2", free_port(), free_port()
        save(staged(), STAGED, request(3, users=3), file)
        # Room for half of the users, so that some go.
        served = Options(file, (CAPACITY,), max_queued_requests=64, cache_bytes=25 * 12)
        at = {"host": "127.0.0.1", "port": port, "grpc_port": grpc_port}
        ray_app.run(served, **at, replicas=2, blocking=False)
        try:
            failed = soak(options, port, grpc_port, log)
        finally:
            serve.shutdown()
            ray.shutdown()
    sys.exit(int(failed))


def soak(options, port, grpc_port, log):
    """Runs the load and the killing; whether anything was wrong."""
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    callers = [Caller(port, grpc_port, number, end) for number in range(options.callers)]
    for caller in callers:
        caller.start()
    born, sizes, hits, killed, next_kill = {}, {}, {}, 0, begin + options.kill_every_s
    while time.monotonic() < end:
        time.sleep(min(options.interval_s, max(0.1, end - time.monotonic())))
        now, alive = time.monotonic(), replicas(port)
        hits |= alive
        for pid in alive.keys() | proxies():
            born.setdefault(pid, now)
            mb = memory_mb(pid)
            if mb is not None and now - born[pid] >= 20:
                sizes.setdefault(pid, []).append(round(mb, 1))
        seen = sum((caller.seen for caller in callers), Counter())
        line = {"s": round(now - begin), "replicas": len(alive), "killed": killed, **seen}
        line["cache_hits"] = sum(hits.values())
        line["rss_mb"] = {pid: series[-1] for pid, series in sizes.items() if pid in born}
        if now >= next_kill and len(alive) == 2 and end - now > 15:
            os.kill(min(alive), signal.SIGKILL)
            born.pop(min(alive))
            killed, next_kill = killed + 1, now + options.kill_every_s
        print(json.dumps(line), file=log, flush=True)
        print(json.dumps(line), flush=True)
    for caller in callers:
        caller.join(60)
    seen = sum((caller.seen for caller in callers), Counter())
    answered = seen.total() - seen["asked"]
    grown = {pid: x for pid, x in sizes.items() if x[-1] > GROWTH * x[0]}
    failed = bool(
        seen["wrong"]
        or seen["hung"]
        or seen["bad accepted"]
        or grown
        or not any(hits.values())
        or answered != seen["asked"]
        or any(caller.is_alive() for caller in callers)
    )
    last = {"failed": failed, "killed": killed, "grown": grown, **seen}
    last["first_and_last_mb"] = {pid: (x[0], x[-1]) for pid, x in sizes.items()}
    print(json.dumps(last), file=log, flush=True)
    print(json.dumps(last), flush=True)
    return failed


if __name__ == "__main__":
    main()
