"""Servers for tests, asked over real connections."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from serving.cases import until

from ikbo_tree.serving import codec


def ask(port, method, path, body=None, headers=None, timeout=30):
    """Status, headers and body of one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def score(port, request, timeout=30):
    """Status and scores, or what else came, of a request sent as `.npz`."""
    status, _, body = ask(
        port, "POST", "/score", codec.to_npz(request), {"Content-Type": codec.NPZ}, timeout
    )
    return status, json.loads(body)["scores"] if status == 200 else body


@contextlib.contextmanager
def in_thread(batcher, **options):
    """A uvicorn server in this process; its port."""
    import uvicorn

    from ikbo_tree.serving.http_app import build_app

    app = build_app(batcher, **options)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def over_grpc(batcher, **options):
    """A gRPC server in this process; its port."""
    import asyncio

    import grpc

    from ikbo_tree.serving import grpc_service
    from ikbo_tree.serving.endpoints import Endpoints

    class Servicer:
        async def Score(self, request, context):  # noqa: N802
            return await grpc_service.answer(endpoints, request, context)

    endpoints, loop = Endpoints(batcher, **options), asyncio.new_event_loop()

    async def start():
        server = grpc.aio.server()
        grpc_service.add_to_server(Servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(5), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
        batcher.close()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def in_process(file, *arguments, engine="uvicorn"):
    """`ikbo-tree serve` as a process of its own; the process and its port."""
    port = free_port()
    command = [sys.executable, "-m", "ikbo_tree.cli", "serve", "--model", str(file)]
    command += ["--engine", engine, "--port", str(port), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        ready_by = time.monotonic() + 120
        while True:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < ready_by, "the server did not start"
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(port, "GET", "/healthz", timeout=2)[0] == 200:
                    break
            time.sleep(0.1)
        yield process, port
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
