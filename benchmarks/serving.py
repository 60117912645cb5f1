"""How many requests a server answers, beside one that people write themselves with FastAPI, on the host.

The same TorchScript models are served by `sluice serve` and by FastAPI with one worker (serving_fastapi.py), each of which is asked
in turn by a program that keeps so many connections busy (http_load.cpp): `rate_ratio` and `p99_ratio` compare the two, each the median
of the rounds. Bodies are four numbers or 16 MiB of them, in JSON or as they are in memory; tensors of 16 MiB as they are in memory are
compared with a loop that only receives them, too (`loop_ratio`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from endpoint import PATIENCE_S, Server, add_model, environment_of
from records import ROOT, Cell, single, write

from demonstration.processes import Failed

BIN = ROOT / "build" / "release" / "bin"
SMALL, LARGE = 4, 4 * 2**20
#: So that slow requests are several.
LONGER_IF_LARGE = 5
#: Of FastAPI's rate: by format, for one connection and for more.
SMALL_TARGETS = {"binary": (3, 9), "json": (3, 7)}
LARGE_TARGETS = {"binary": 2, "json": 10}


def add_models(repository: Path) -> None:
    import torch

    class PlusOne(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1, keepdim=True)

    for name, module, elements, answers in (("small", PlusOne(), SMALL, SMALL), ("large", Sum(), LARGE, 1)):
        add_model(repository, name, module, {"x": ("TYPE_FP32", [elements])}, {"y": ("TYPE_FP32", [answers])}, max_batch=1)


@contextlib.contextmanager
def sluice(folder: Path, repository: Path) -> Iterator[int]:
    policy = folder / "policy.yaml"
    policy.write_text(f"version: 1\nserver: {{model_repository: {repository}, max_body: 256MiB, max_waiting_bodies: 1GiB}}\n"
                      "pool: {backend: host, memory: 64MiB}\n"
                      "models:\n" + "".join(f"  - {{name: {name}, slo: {{latency: 5s}}, max_queue: 64}}\n" for name in ("small", "large")),
                      encoding="utf-8")
    server = Server(BIN / "sluice", policy, environment_of(folder / "run", SLUICE_LOG="warn"))
    try:
        yield server.listen().address[1]
    finally:
        server.end()
        with contextlib.suppress(ConnectionRefusedError):  # it goes by itself when nobody needs it
            end_broker(folder / "run")


@contextlib.contextmanager
def fastapi(repository: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        process = subprocess.Popen([sys.executable, Path(__file__).with_name("serving_fastapi.py"), repository, str(listening.fileno())],
                                   pass_fds=[listening.fileno()])
        port = listening.getsockname()[1]
    try:
        first = urllib.request.Request(f"http://127.0.0.1:{port}/json/small", json.dumps({"x": [0.0] * SMALL}).encode())
        with urllib.request.urlopen(first, timeout=PATIENCE_S) as answer:  # which waits until it has started
            if json.load(answer) != {"y": [1.0] * SMALL}:
                raise Failed("FastAPI computes something else")
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def dropping(size: int) -> Iterator[int]:
    with subprocess.Popen([BIN / "sluice-bench-http-load", "--drop", str(size)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def post(path: str, body: bytes, **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}",
             *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True)
class Requests:
    """The same values, as each of the two takes them."""

    sluice: bytes
    fastapi: bytes


def requests_of(model: str, elements: int, form: str) -> Requests:
    import torch

    x = torch.rand(elements, generator=torch.Generator().manual_seed(1))
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, elements]}
    path = f"/v2/models/{model}/infer"
    if form == "json":
        return Requests(post(path, json.dumps({"inputs": [{**tensor, "data": x.tolist()}]}).encode()),
                        post(f"/json/{model}", json.dumps({"x": x.tolist()}).encode()))
    raw = x.numpy().tobytes()
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}],
                       "parameters": {"binary_data_output": True}}).encode()
    return Requests(post(path, head + raw, Inference_Header_Content_Length=len(head)), post(f"/raw/{model}", raw))


class Load:
    """A request in a file, which is sent to one server after another."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._file = folder / "request"
        self._seconds = seconds

    def __call__(self, request: bytes, port: int, connections: int, rate_per_s: float = 0.0) -> dict:
        """With a rate: requests arrive by themselves."""
        seconds = self._seconds * (LONGER_IF_LARGE if len(request) > 2**20 else 1)
        self._file.write_bytes(request)
        done = subprocess.run([BIN / "sluice-bench-http-load", "--request", self._file, "--port", str(port),
                               "--connections", str(connections), "--seconds", str(seconds),
                               *(["--rate", str(rate_per_s)] if rate_per_s else [])], capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(done.stderr)
        return json.loads(done.stdout)


def medians(rounds: list[list[dict]], of: Callable[[dict], float]) -> list[float]:
    """Of each system's value over that of the second."""
    return [statistics.median(of(one[i]) / of(one[1]) for one in rounds) for i in range(len(rounds[0]))]


def cell_of(size: str, form: str, connections: int, rounds: list[list[dict]], targets: dict[str, str]) -> Cell:
    rate = medians(rounds, lambda seen: seen["rate_per_s"])
    p99 = medians(rounds, lambda seen: seen["latency_us"]["p99"])
    how = "FastAPI, same run"
    metrics = {"rate_ratio": single(rate[0], how), "p99_ratio": single(p99[0], how), "latency_us": rounds[-1][0]["latency_us"],
               "rate_per_s": single(statistics.median(one[0]["rate_per_s"] for one in rounds)),
               "fastapi_rate_per_s": single(statistics.median(one[1]["rate_per_s"] for one in rounds))}
    if len(rate) > 2:
        metrics["loop_ratio"] = single(rate[0] / rate[2], "a loop that only receives the bytes, same run")
    return Cell({"body": size, "format": form, "connections": connections, "system": "sluice"}, metrics, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    clear_up_on_sigterm()
    cells = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as servers:
        folder = Path(name)
        add_models(folder / "models")
        load = Load(folder, args.seconds)
        ours = servers.enter_context(sluice(folder, folder / "models"))
        theirs = servers.enter_context(fastapi(folder / "models"))
        for form in ("binary", "json"):
            small, large = requests_of("small", SMALL, form), requests_of("large", LARGE, form)
            for connections in (1, 16, 64):
                rounds = [[load(small.sluice, ours, connections), load(small.fastapi, theirs, connections)] for _ in range(args.rounds)]
                least = SMALL_TARGETS[form][connections > 1]
                cells.append(cell_of("4 numbers", form, connections, rounds,
                                     {"rate_ratio.value": f">= {least}", "p99_ratio.value": "<= 1"}))
            for connections in (1, 4):
                with dropping(len(large.sluice)) as loop:
                    rounds = [[load(large.sluice, ours, connections), load(large.fastapi, theirs, connections),
                               *([load(large.sluice, loop, connections)] if form == "binary" else [])] for _ in range(args.rounds)]
                targets = {"rate_ratio.value": f">= {LARGE_TARGETS[form]}", **({"loop_ratio.value": ">= 0.6"} if form == "binary" else {})}
                cells.append(cell_of("16 MiB", form, connections, rounds, targets))
    write("serving", cells)


if __name__ == "__main__":
    main()
