#!/usr/bin/env python3
"""Asks a server for answers as an open world would: at random instants, whether or not it keeps up.

    python examples/load.py --url http://127.0.0.1:8000 --requests examples/model_repository/.requests \\
        --rate minilm=4 --rate silero_vad=2 --on 3 --off 4 --seconds 20

Requests for each model are a Poisson process while the load is on; then all of it is off; and so on. The instants are
fixed beforehand by the seed. A request is sent at its instant whatever became of those before, and its latency counts
from that instant, so that a server that stands still is seen to. Every answer is compared with the one that the eager
model gave when the requests were made.

Each request becomes a line of JSON in --log, and at the end (also after SIGTERM or SIGINT, which stop the sending) one
object with the summary goes to standard output. A request is cold if its model became ready while it waited, as the
server's own list of loads tells; asking for that list wakes no model. Exit status: 0, also when answers were wrong or
missing, which the summary counts; 1 if there is no server.
"""

import argparse
import http.client
import itertools
import json
import math
import queue
import random
import signal
import threading
import time
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

THREADS = 64  # requests on their way at once; beyond, sending is late, and the latency says so
POLL_SECONDS = 2.0  # the server keeps its last 64 loads
LIMIT_SECONDS = 60.0  # for one answer


@dataclass(frozen=True)
class Planned:
    """A request that is due `at` seconds after the start."""

    at: float
    model: str
    sample: int


def plan(rates: dict[str, float], on: float, off: float, seconds: float, seed: int) -> list[Planned]:
    """All requests in order of time. A pure function; each model's do not depend on which others there are."""
    planned = []
    for model, rate in rates.items():
        dice = random.Random(f"{seed} {model}")
        busy = 0.0  # seconds of load so far: the process stands still while the load is off
        for sample in itertools.count():
            busy += dice.expovariate(rate)
            at = busy + math.floor(busy / on) * off
            if at >= seconds:
                break
            planned.append(Planned(at, model, sample))
    return sorted(planned, key=lambda each: each.at)


def quantiles(values: Iterable[float]) -> dict[str, float | int | None]:
    """n, p50, p90, p99 and max, each a value that occurred: the smallest with that share at or below it."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"n": len(ordered), **{
        name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None for name, share in at.items()}}


class Server:
    """Connections to one server, kept open, one a thread. Failures of the network are OSError or HTTPException."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise SystemExit(f"--url must be like http://127.0.0.1:8000, not {url}")
        self._address = parts.hostname, parts.port or 80
        self._own = threading.local()

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body. A connection that the server had closed meanwhile is opened anew, once."""
        kept = getattr(self._own, "connection", None)
        connection = kept or http.client.HTTPConnection(*self._address, timeout=LIMIT_SECONDS)
        self._own.connection = None
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            result = answer.status, answer.read()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            connection.close()
            if kept is None:
                raise
            return self.ask(method, path, body)
        except BaseException:
            connection.close()
            raise
        self._own.connection = connection
        return result


class Samples:
    """The requests for one model, ready to be sent, with the answers that are right."""

    def __init__(self, file: Path, tolerance: float) -> None:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if not lines:
            raise SystemExit(f"{file} holds no request")
        self._bodies = [json.dumps({"inputs": line["inputs"]}).encode() for line in lines]
        self._expected = [line["expected"] for line in lines]
        self._tolerance = tolerance

    def body(self, index: int) -> bytes:
        return self._bodies[index % len(self._bodies)]

    def judge(self, index: int, answer: bytes) -> tuple[bool, float | None]:
        """Whether the answer is right, and its largest absolute error."""
        try:
            given = {each["name"]: each for each in json.loads(answer)["outputs"]}
            worst = 0.0
            for wanted in self._expected[index % len(self._expected)]:
                tensor = given[wanted["name"]]
                if (tensor["shape"], tensor["datatype"]) != (wanted["shape"], wanted["datatype"]):
                    return False, None
                errors = [abs(float(a) - b) for a, b in zip(tensor["data"], wanted["data"], strict=True)]
                if not all(map(math.isfinite, errors)):
                    return False, None
                worst = max(worst, *errors)
        except (ValueError, TypeError, KeyError):
            return False, None
        return worst <= self._tolerance, worst


class Load:
    """Sends what is planned and keeps a record of each request."""

    def __init__(self, server: Server, samples: dict[str, Samples], planned: list[Planned]) -> None:
        self._server, self._samples, self._planned = server, samples, planned
        self._due: queue.SimpleQueue[Planned | None] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()  # to stop; may be filled by a signal handler
        self._over = threading.Event()
        self._start = 0.0
        self._unix_start = 0.0
        self._loads: set[tuple[str, float]] = set()  # model and when it became ready
        self.records: list[dict] = []  # appended by the senders

    def stop(self) -> None:
        """Sends no more; answers on their way are still waited for. Safe in a signal handler."""
        self._orders.put("stop")

    def run(self) -> None:
        senders = [threading.Thread(target=self._send_all, daemon=True) for _ in range(THREADS)]
        watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (*senders, watcher):
            thread.start()
        self._start, self._unix_start = time.perf_counter(), time.time()
        for each in self._planned:
            try:
                self._orders.get(timeout=max(0.0, self._start + each.at - time.perf_counter()))
                break
            except queue.Empty:
                self._due.put(each)
        for _ in senders:
            self._due.put(None)
        for thread in senders:
            thread.join(LIMIT_SECONDS)
        self._over.set()
        watcher.join(LIMIT_SECONDS)
        self._mark_cold()

    def _send_all(self) -> None:
        while (each := self._due.get()) is not None:
            self.records.append(self._send(each))

    def _send(self, each: Planned) -> dict:
        samples = self._samples[each.model]
        sent = time.perf_counter() - self._start
        record = {"model": each.model, "scheduled_s": each.at, "sent_s": sent, "status": None, "correct": None,
                  "max_error": None, "error": None}
        answer = b""
        try:
            record["status"], answer = self._server.ask("POST", f"/v2/models/{each.model}/infer",
                                                        samples.body(each.sample))
        except (OSError, http.client.HTTPException) as failure:
            record["error"] = f"{type(failure).__name__}: {failure}"
        record["done_s"] = time.perf_counter() - self._start
        record["latency_ms"] = (record["done_s"] - each.at) * 1e3
        if record["status"] == 200:
            record["correct"], record["max_error"] = samples.judge(each.sample, answer)
        elif record["status"] is not None:
            record["error"] = answer.decode(errors="replace")[:500]
        return record

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(POLL_SECONDS)
            try:
                status, body = self._server.ask("GET", "/v2/sluice/status")
                events = json.loads(body)["handovers"] if status == 200 else []
                self._loads |= {(event["model"], event["at_unix_s"]) for event in events}
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                continue  # the next time tells the same

    def _mark_cold(self) -> None:
        for record in self.records:
            record["cold"] = any(
                model == record["model"] and record["sent_s"] <= at - self._unix_start <= record["done_s"]
                for model, at in self._loads)

    def summary(self) -> dict:
        models = {}
        for model in self._samples:
            mine = [r for r in self.records if r["model"] == model]
            answered = [r for r in mine if r["status"] == 200]
            models[model] = {
                "sent": len(mine), "right": sum(r["correct"] for r in answered),
                "wrong": sum(not r["correct"] for r in answered), "failed": len(mine) - len(answered),
                "max_error": max((r["max_error"] for r in answered if r["max_error"] is not None), default=None),
                "first_error": next((r["error"] for r in mine if r["error"]), None),
                "warm_ms": quantiles(r["latency_ms"] for r in answered if not r["cold"]),
                "cold_ms": quantiles(r["latency_ms"] for r in answered if r["cold"]),
            }
        late = quantiles((r["sent_s"] - r["scheduled_s"]) * 1e3 for r in self.records)
        return {"models": models, "sent_late_ms": late}


def model_rate(text: str) -> tuple[str, float]:
    model, _, rate = text.partition("=")
    try:
        if model and float(rate) > 0:
            return model, float(rate)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be MODEL=REQUESTS_PER_SECOND, like minilm=4, not {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Poisson load with idle phases.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=Path, required=True, help="folder with MODEL.jsonl for every model")
    parser.add_argument("--rate", type=model_rate, action="append", required=True, metavar="MODEL=PER_SECOND")
    parser.add_argument("--on", type=float, default=3.0, metavar="SECONDS", help="length of a phase with load")
    parser.add_argument("--off", type=float, default=4.0, metavar="SECONDS", help="length of a phase without")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the whole (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-3,
                        help="largest absolute error of a right answer (default %(default)s)")
    parser.add_argument("--log", type=Path, help="write a line for every request there")
    options = parser.parse_args()
    if options.on <= 0 or options.off < 0:
        parser.error("--on must be above 0, and --off at least 0")

    server = Server(options.url)
    rates = dict(options.rate)
    samples = {}
    for model in rates:
        file = options.requests / f"{model}.jsonl"
        if not file.exists():
            parser.error(f"there is no {file}; run examples/prepare_models.py")
        samples[model] = Samples(file, options.tolerance)
    try:
        server.ask("GET", "/v2/health/live")
    except (OSError, http.client.HTTPException) as failure:
        parser.exit(1, f"no server at {options.url}: {failure}\n")

    load = Load(server, samples, plan(rates, options.on, options.off, options.seconds, options.seed))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: load.stop())
    load.run()
    if options.log:
        with options.log.open("w", encoding="utf-8") as log:
            for record in sorted(load.records, key=lambda r: r["scheduled_s"]):
                log.write(json.dumps(record) + "\n")
    print(json.dumps(load.summary()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
