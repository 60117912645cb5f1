"""The running server's part of the benchmark `prediction`: models on the host, asked by streams of their own, and what is predicted of each
while its requests come against what comes of them, as its clients see it.

Models take 10 to 60 ms and have the same share of the load each, 50 % together; a promise is six services of the model. Clients do not wait for answers
before they ask again: a request's time begins when its stream says, also where the client is late.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brokers import end_broker
from endpoint import Server, add_rounds_models, environment_of
from records import ROOT, Cell, single

PATIENCE_S = 60.0
SERVICES_MS = {2: (20, 60), 4: (10, 20, 40, 60)}
LOAD = 0.5
LATENCY_SERVICES = 6
CONNECTIONS = 48
#: Factors of the mean rate, and switches a second out of either.
STREAMS = {"poisson": ((1.0, 1.0), 1.0), "mmpp": ((1.8, 0.2), 0.1)}
TARGET = {"error_points.value": "<= 6"}
KEPT = {"kept_percent.value": ">= 90"}


def arrivals(stream: str, rate: float, length_s: float, random_numbers: random.Random) -> Iterator[float]:
    """Instants of a Poisson process whose rate switches."""
    (factors, switches), now, state = STREAMS[stream], 0.0, random_numbers.randrange(2)
    switches_at = random_numbers.expovariate(switches)
    while True:
        gap = random_numbers.expovariate(rate * factors[state])
        if now + gap > switches_at:  # without memory: it is drawn anew
            now, state = switches_at, 1 - state
            switches_at = now + random_numbers.expovariate(switches)
            continue
        now += gap
        if now > length_s:
            return
        yield now


@dataclass
class Seen:
    """Of one model."""

    in_time: list[bool] = field(default_factory=list)
    admitted: list[bool] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)


class Clients:
    """So many connections, which take requests in the order of their time."""

    def __init__(self, server: Server, bodies: list[bytes], latencies_s: list[float]) -> None:
        self._server, self._bodies, self._latencies_s = server, bodies, latencies_s
        self.seen = [Seen() for _ in bodies]
        self.failures: list[BaseException] = []
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._ask_all, daemon=True) for _ in range(CONNECTIONS)]
        for each in self._threads:
            each.start()

    def send(self, model: int, at: float, counts: bool, predicted: float) -> None:
        self._work.put((model, at, counts, predicted))

    def end(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for each in self._threads:
            each.join(PATIENCE_S)
        if self.failures:
            raise self.failures[0]

    def _ask_all(self) -> None:
        try:
            connection = http.client.HTTPConnection(*self._server.address, timeout=PATIENCE_S)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while work := self._work.get():
                model, at, counts, predicted = work
                connection.request("POST", f"/v2/models/m{model}/infer", self._bodies[model])
                answer = connection.getresponse()
                answer.read()
                took = time.monotonic() - at
                if answer.status not in (200, 503):
                    raise RuntimeError(f"a request of m{model} was answered {answer.status}")
                if counts:
                    self.seen[model].admitted.append(answer.status == 200)
                    self.seen[model].in_time.append(answer.status == 200 and took <= self._latencies_s[model])
                    self.seen[model].predicted.append(predicted)
        except BaseException as failure:
            self.failures.append(failure)


@contextlib.contextmanager
def serving(preset: str, folder: Path, latencies_s: list[float], on_miss: str) -> Iterator[Server]:
    policy = folder / "policy.yaml"
    promises = "".join(f"  - {{name: m{number}, slo: {{percentile: 90%, latency: {1e3 * latency:.0f}ms, attainment: 90%, window: 1m}}, max_queue: 4096, "
                       f"on_miss_predicted: {on_miss}}}\n" for number, latency in enumerate(latencies_s))
    policy.write_text(f"version: 1\nserver: {{model_repository: {folder / 'models'}, parallel_models: 1}}\npool: {{backend: host, memory: 64MiB}}\n"
                      f"models:\n{promises}", encoding="utf-8")
    server = Server(ROOT / "build" / preset / "bin" / "sluice", policy, environment_of(folder / "run", SLUICE_LOG="warn"), options=("--threads", "1"))
    try:
        yield server.listen()
    finally:
        server.end()
        with contextlib.suppress(ConnectionRefusedError):  # it goes by itself when nobody needs it
            end_broker(folder / "run")


def play(preset: str, models: int, stream: str, seed: int, before_s: float, length_s: float, on_miss: str = "queue") -> list[Seen]:
    """What came of the requests of each model in `length_s`, after `before_s` that do not count."""
    services_s = [each / 1e3 for each in SERVICES_MS[models]]
    latencies_s = [LATENCY_SERVICES * each for each in services_s]
    numbers = random.Random(seed)
    plan = sorted((at, model) for model, service in enumerate(services_s)
                  for at in arrivals(stream, LOAD / models / service, before_s + length_s, numbers))
    with tempfile.TemporaryDirectory(prefix="sluice-prediction-") as there:
        folder = Path(there)
        round_ms = add_rounds_models(folder / "models", *(f"m{model}" for model in range(models)))
        bodies = [json.dumps({"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [round(1e3 * each / round_ms)]}]}).encode()
                  for each in services_s]
        with serving(preset, folder, latencies_s, on_miss) as server:
            predicted = [1.0] * models
            over = threading.Event()

            def watch() -> None:
                while not over.wait(1.0):
                    for each in server.status()["models"]:
                        predicted[int(each["name"][1:])] = each["predicted_attainment"]

            clients = Clients(server, bodies, latencies_s)
            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            begin = time.monotonic()
            for at, model in plan:
                time.sleep(max(0.0, begin + at - time.monotonic()))
                clients.send(model, begin + at, at >= before_s, predicted[model])
            clients.end()
            over.set()
            watcher.join(PATIENCE_S)
            return clients.seen


def server_cells(preset: str, seeds: int, before_s: float, length_s: float) -> Iterator[Cell]:
    for models in SERVICES_MS:
        for stream in STREAMS:
            runs = [play(preset, models, stream, seed, before_s, length_s) for seed in range(1, seeds + 1)]
            for number, service_ms in enumerate(SERVICES_MS[models]):
                in_time = [each for run in runs for each in run[number].in_time]
                predicted = [each for run in runs for each in run[number].predicted]
                share, said = 100 * statistics.fmean(in_time), 100 * statistics.fmean(predicted)
                yield Cell({"where": "server", "models": models, "trace": stream, "service_ms": service_ms},
                           {"error_points": single(abs(said - share), "the share in time as clients saw it, same run"), "in_time_percent": single(share),
                            "predicted_percent": single(said), "served": single(len(in_time))}, TARGET)


def rejecting_cells(preset: str, seeds: int, before_s: float, length_s: float) -> Iterator[Cell]:
    """With `on_miss_predicted: reject`: of the requests that are admitted, those in time; and how many are, and would have been, without."""
    for models in SERVICES_MS:
        runs = [play(preset, models, "mmpp", seed, before_s, length_s, "reject") for seed in range(1, seeds + 1)]
        queued = [play(preset, models, "mmpp", seed, before_s, length_s) for seed in range(1, seeds + 1)]
        for number, service_ms in enumerate(SERVICES_MS[models]):
            in_time = [each for run in runs for each in run[number].in_time]
            admitted = [each for run in runs for each in run[number].admitted]
            otherwise = [each for run in queued for each in run[number].in_time]
            yield Cell({"where": "server", "models": models, "trace": "mmpp", "service_ms": service_ms, "on_miss": "reject"},
                       {"kept_percent": single(100 * sum(in_time) / max(1, sum(admitted)), "90, as promised"),
                        "admitted_percent": single(100 * statistics.fmean(admitted)), "in_time_percent": single(100 * statistics.fmean(in_time)),
                        "queued_percent": single(100 * statistics.fmean(otherwise), "in time where none is refused, same run"),
                        "served": single(len(in_time))}, KEPT)
