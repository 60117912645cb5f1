"""A fast model's latency, and that of the health route, beside something slow in the same server, on the host.

A client asks a model of about a millisecond, one request after the other over one connection, alone and then beside each
neighbour in turn, several rounds of both: `p99_ratio` is the 99th percentile beside over that alone, of all rounds. A
second client asks `/v2/health/live` all the while. Neighbours: a model of 200 ms with two clients, so that a request of it
always waits; three clients that send bodies of 16 MiB to a model that adds them up; for comparison the same three with a
program beside the server that drops what they send; and connections that are open and say nothing. Clients that stand for other machines give way to the server's threads (nice 19), but for the two measured.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import multiprocessing
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from endpoint import Server, add_model, add_rounds_models, environment_of
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed

PROGRAM = ROOT / "build" / "release" / "bin" / "sluice"
MIB = 2**20
BODY_BYTES = 16 * MIB
NUMBERS = 2_000_000
PATIENCE_S = 120.0
HEALTH_EVERY_S = 0.005
FAST_MS, SLOW_MS = 1.0, 200.0


def add_models(repository: Path) -> tuple[int, int]:
    """The models' files; how many rounds make the fast and the slow one as long as they are named."""
    import torch

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1, keepdim=True)

    a_round_ms = add_rounds_models(repository, "fast", "slow")
    add_model(repository, "sum", Sum(), {"x": ("TYPE_FP32", [NUMBERS])}, {"y": ("TYPE_FP32", [1])}, max_batch=1)
    return max(1, round(FAST_MS / a_round_ms)), round(SLOW_MS / a_round_ms)


@contextlib.contextmanager
def serving(folder: Path, repository: Path) -> Iterator[tuple[str, int]]:
    policy = folder / "policy.yaml"
    models = "".join(f"  - {{name: {name}, slo: {{latency: 5s}}, max_queue: 64}}\n" for name in ("fast", "slow", "sum"))
    policy.write_text(f"version: 1\nserver: {{model_repository: {repository}}}\npool: {{backend: host, memory: 64MiB}}\n"
                      f"models:\n{models}", encoding="utf-8")
    server = Server(PROGRAM, policy, environment_of(folder / "run", SLUICE_LOG="warn"), options=("--threads", "1"))
    try:
        yield server.listen().address
    finally:
        server.end()
        with contextlib.suppress(ConnectionRefusedError):  # it goes by itself when nobody needs it
            end_broker(folder / "run")


class Client:
    """One connection that stays open."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ms(self, path: str, body: bytes | None = None) -> float:
        began = time.monotonic()
        self._connection.request("GET" if body is None else "POST", path, body)
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.monotonic() - began
        if answer.status != 200:
            raise Failed(f"{path} was answered {answer.status}: {text[:300]!r}")
        return 1e3 * took


def rounds_body(rounds: int) -> bytes:
    return json.dumps({"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [rounds]}]}).encode()


def ask_for_ever(address: tuple[str, int], path: str, body: bytes, begun) -> None:
    os.nice(19)
    client = Client(address)
    client.ms(path, body)
    begun.release()
    while True:
        client.ms(path, body)


def send_bodies(address: tuple[str, int], begun) -> None:
    """Of 16 MiB each: as many numbers, with as many digits as that takes."""
    digits = BODY_BYTES // NUMBERS - 1
    numbers = ",".join(["0." + "1" * (digits - 2)] * NUMBERS)
    head = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": [1, {NUMBERS}], "data": ['
    ask_for_ever(address, "/v2/models/sum/infer", f"{head}{numbers}]}}]}}".encode(), begun)


def drop_bodies(port, begun) -> None:
    """An HTTP server that reads bodies and answers `{}`."""

    class Dropping(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            left, piece = int(self.headers["Content-Length"]), bytearray(MIB)
            while left > 0:
                left -= self.rfile.readinto1(memoryview(piece)[:min(left, MIB)])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that is killed."""

    os.nice(10)  # as the server's threads for bodies
    server = Server(("127.0.0.1", 0), Dropping)
    port.value = server.server_address[1]
    begun.release()
    server.serve_forever()


@contextlib.contextmanager
def dropped_bodies() -> Iterator[None]:
    port = multiprocessing.get_context("spawn").Value("i", 0)
    with processes(1, drop_bodies, port), processes(3, send_bodies, ("127.0.0.1", port.value)):
        yield


def stay_connected(address: tuple[str, int], count: int, begun) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(count)]
    begun.release()
    time.sleep(1e6)
    del held


@contextlib.contextmanager
def processes(count: int, target: Callable, *arguments) -> Iterator[None]:
    """So many of them, once each has begun; ended when it is left, none having ended before."""
    context = multiprocessing.get_context("spawn")
    begun = context.Semaphore(0)
    started = [context.Process(target=target, args=(*arguments, begun), daemon=True) for _ in range(count)]
    for each in started:
        each.start()
    try:
        for _ in started:
            if not begun.acquire(timeout=PATIENCE_S):
                raise Failed("a neighbour did not begin")
        yield
        if not all(each.is_alive() for each in started):
            raise Failed("a neighbour has ended")
    finally:
        for each in started:
            each.kill()
            each.join()


@dataclass
class Samples:
    fast_ms: list[float] = field(default_factory=list)
    live_ms: list[float] = field(default_factory=list)


def measure(address: tuple[str, int], body: bytes, requests: int, into: Samples) -> None:
    over = threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            client = Client(address)
            while not over.wait(HEALTH_EVERY_S):
                into.live_ms.append(client.ms("/v2/health/live"))
        except BaseException as failure:
            failures.append(failure)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        client = Client(address)
        for _ in range(requests // 20):
            client.ms("/v2/models/fast/infer", body)  # not counted: the connection is new
        into.fast_ms += [client.ms("/v2/models/fast/infer", body) for _ in range(requests)]
    finally:
        over.set()
        watcher.join()
    if failures:
        raise failures[0]


def cell_of(beside: str, target: str, alone: Samples, with_it: Samples) -> Cell:
    base, seen = distribution(alone.fast_ms), distribution(with_it.fast_ms)
    how = "alone, same run"
    if not target:
        return Cell({"model": f"{FAST_MS:g} ms", "beside": beside, "system": "a program that drops them"},
                    {"p99_ratio": single(seen["p99"] / base["p99"], how), "latency_ms": seen, "alone_ms": base})
    return Cell({"model": f"{FAST_MS:g} ms", "beside": beside, "system": "sluice"},
                {"p99_ratio": single(seen["p99"] / base["p99"], how), "p50_ratio": single(seen["p50"] / base["p50"], how),
                 "latency_ms": seen, "alone_ms": base, "live_ms": distribution(with_it.live_ms)},
                {"p99_ratio.value": target, "live_ms.p99": "<= 10"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of the fast model in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=10_000)
    args = parser.parse_args()
    clear_up_on_sigterm()
    cells = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fast, slow = add_models(folder / "models")
        with serving(folder, folder / "models") as address:
            bodies = "three clients of 16 MiB bodies"
            neighbours = [
                (f"a {SLOW_MS:g} ms model under full load", "<= 3",
                 lambda: processes(2, ask_for_ever, address, "/v2/models/slow/infer", rounds_body(slow))),
                (bodies, "<= 2", lambda: processes(3, send_bodies, address)),
                (bodies, "", dropped_bodies),
                (f"{args.connections} idle connections", "<= 1.25",
                 lambda: processes(1, stay_connected, address, args.connections))]
            body = rounds_body(fast)
            for beside, target, neighbour in neighbours:
                alone, with_it = Samples(), Samples()
                for _ in range(args.rounds):
                    measure(address, body, args.requests, alone)
                    with neighbour():
                        measure(address, body, args.requests, with_it)
                cells.append(cell_of(beside, target, alone, with_it))
    write("neighbours", cells)


if __name__ == "__main__":
    main()
