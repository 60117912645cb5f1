"""What it costs an engine to stand behind `sluice serve`, and how long it takes to be woken.

    ./benchmarks/run.sh engines [--requests 2000] [--streams 100]        # the proxy
    ./benchmarks/run.sh engines --wake [--layers 32] [--width 4096]     # besides, on a GPU: parked and woken
    ./benchmarks/run.sh engines --crowd [--backend host] [--engines 10]  # besides: many in a pool for few, beside training

`part=proxy`: the same engine (engines_server.py) is asked through the server and past it, in turns. `added_us` is what an exchange of a small
body takes through the server, less the median past it, with connections that are kept and (`kept_connections=0`) a new one for each; `first_byte_added_us` the same until the first event of a stream, and
`event_added_us` the same from when the engine sends an event until it is here.

`part=wake`: the example's engine, FastAPI and transformers as they are, with a model of so many layers. It is parked when it has been idle for a
moment; a request then waits until it is back. `wake_ratio` is the time until the first token, over what it takes at least: the bytes
that had gone by the rate of one plain copy of as many in the same run, the same request when it is warm, and 5 ms. Its answers must be
the same each time.

`part=crowd`: engines_crowd.py.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from endpoint import PATIENCE_S, Server, environment_of
from engines_crowd import measure_crowd
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed, has_cuda

SLUICE = ROOT / "build" / "release" / "bin" / "sluice"
EXAMPLE = ROOT / "examples" / "engine" / "server.py"
GIB = 1 << 30
WARM_UP = 20
ALLOWANCE_S = 0.005
PROMPT = {"prompt": "Once upon a time", "max_tokens": 16, "stream": True}


@contextlib.contextmanager
def serving(folder: Path, pool: str, engine: str, more: str = "") -> Iterator[Server]:
    """A server with that engine, which is ready."""
    policy = folder / "policy.yaml"
    policy.write_text(f"version: 1\nserver: {{request_timeout: 5m}}\npool: {{{pool}}}\n{more}models:\n  - {engine}\n", encoding="utf-8")
    server = Server(SLUICE, policy, environment_of(folder / "run", SLUICE_LOG="warn"), folder / "log").listen()
    try:
        until = time.monotonic() + 3 * PATIENCE_S
        while state(server)["state"] not in ("ready", "parking", "parked"):
            if time.monotonic() > until:
                raise Failed(f"the engine is not ready: {state(server)}\n{server.log()}")
            time.sleep(0.05)
        yield server
    finally:
        server.end()
        with contextlib.suppress(ConnectionRefusedError):
            end_broker(folder / "run")


def state(server: Server) -> dict:
    return server.status()["engines"][0]


# --- the proxy --------------------------------------------------------------------------------------------------------


def exchange(client: http.client.HTTPConnection, body: bytes) -> float:
    """In microseconds."""
    began = time.perf_counter_ns()
    client.request("POST", "/echo", body)
    answer = client.getresponse()
    if answer.read() != body:
        raise Failed("an answer is not the body that was sent")
    return (time.perf_counter_ns() - began) / 1000


def stream(client: http.client.HTTPConnection, count: int, gap_ms: float) -> tuple[float, list[float]]:
    """Until the first event, and of each event from its sending on, in microseconds."""
    began = time.monotonic_ns()
    client.request("GET", f"/events?count={count}&gap_ms={gap_ms}")
    answer = client.getresponse()
    first, took = 0.0, []
    while line := answer.readline():
        if line.startswith(b"data: "):
            now = time.monotonic_ns()
            first = first or (now - began) / 1000
            took.append((now - int(line[6:])) / 1000)
    if len(took) != count:
        raise Failed(f"{len(took)} events have come of {count}")
    return first, took


def beyond(through: list[float], past: list[float]) -> dict:
    """Through the server, less the median past it."""
    usual = statistics.median(past)
    return distribution(one - usual for one in through)


def measure_proxy(requests: int, streams: int, kept: int, events: int = 50, gap_ms: float = 5.0) -> Cell:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = f"{sys.executable}, {ROOT / 'benchmarks' / 'engines_server.py'}, --port, '{{port}}', --port-file, {folder / 'port'}"
        engine = (f"{{name: engine, slo: {{latency: 5s}}, engine: {{command: [{program}], ready: /health, routes: [/echo, /events], "
                  f"memory: own, start: at_boot, kept_connections: {kept}}}}}")
        with serving(folder, "backend: host, memory: 64MiB", engine) as server:
            port = int((folder / "port").read_text(encoding="utf-8"))
            clients = [http.client.HTTPConnection("127.0.0.1", each, timeout=PATIENCE_S) for each in (server.address[1], port)]
            exchanges: list[list[float]] = [[], []]
            for _ in range(WARM_UP + requests):
                for client, seen in zip(clients, exchanges, strict=True):
                    seen.append(exchange(client, b"x" * 256))
            firsts: list[list[float]] = [[], []]
            gone: list[list[float]] = [[], []]
            for _ in range(streams):
                for client, first, seen in zip(clients, firsts, gone, strict=True):
                    one, took = stream(client, events, gap_ms)
                    first.append(one)
                    seen.extend(took)
    through, past = (seen[WARM_UP:] for seen in exchanges)
    targets = {"added_us.p50": "<= 300"} if kept else {}
    return Cell({"part": "proxy", "kept_connections": kept, "body_bytes": 256, "events": events, "gap_ms": gap_ms},
                {"added_us": beyond(through, past), "first_byte_added_us": beyond(*firsts), "event_added_us": beyond(*gone),
                 "direct_us": distribution(past)},
                targets | {"first_byte_added_us.p99": "<= 2000", "event_added_us.p99": "<= 2000"})


# --- waking -----------------------------------------------------------------------------------------------------------


def first_token(server: Server) -> tuple[float, list[str]]:
    """In seconds, and the events of the whole answer."""
    client = http.client.HTTPConnection(*server.address, timeout=3 * PATIENCE_S)
    with contextlib.closing(client):
        began = time.monotonic()
        client.request("POST", "/v1/completions", json.dumps(PROMPT), {"Content-Type": "application/json"})
        answer = client.getresponse()
        lines = [answer.readline().decode()]
        took = time.monotonic() - began
        if answer.status != 200:
            raise Failed(f"the engine answers {answer.status}: {lines[0]}")
        return took, lines + [line.decode() for line in answer]


def copy_rate(size: int) -> float:
    """Bytes a second of one plain copy to the device, of pinned memory."""
    import torch

    block = torch.empty(min(size, 2 * GIB), dtype=torch.uint8, pin_memory=True)
    there = block.cuda()
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.monotonic()
        there.copy_(block, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, block.numel() / (time.monotonic() - began))
    return best


def measure_wake(layers: int, width: int, pool_gib: int, wakes: int) -> Cell:
    with tempfile.TemporaryDirectory() as name:
        program = f"{sys.executable}, {EXAMPLE}, --port, '{{port}}', --layers, '{layers}', --width, '{width}'"
        engine = (f"{{name: engine, slo: {{latency: 5s}}, warm: {{mode: fixed, max_idle: 1s}}, engine: {{command: [{program}], ready: /health, "
                  "routes: [/v1/*], start: at_boot, start_timeout: 5m}}")
        with serving(Path(name), f"backend: cuda, memory: {pool_gib}GiB", engine, f"host_copies: {{memory: {pool_gib}GiB}}\n") as server:
            _, wanted = first_token(server)
            warm = statistics.median(first_token(server)[0] for _ in range(5))
            ratios, times, gone = [], [], 0
            for _ in range(wakes):
                until = time.monotonic() + PATIENCE_S
                while (seen := state(server))["state"] != "parked":
                    if time.monotonic() > until:
                        raise Failed(f"the engine is not parked: {seen}")
                    time.sleep(0.02)
                gone = seen["parked_bytes"]
                least = gone / copy_rate(gone) + warm + ALLOWANCE_S
                took, found = first_token(server)
                if found != wanted:
                    raise Failed("an answer is not the one that the engine gave at first")
                times.append(1000 * took)
                ratios.append(took / least)
    return Cell({"part": "wake", "engine": "FastAPI and transformers", "layers": layers, "width": width, "gib": round(gone / GIB, 1)},
                {"wake_ratio": single(statistics.median(ratios), "bytes by one plain copy's rate, warm service and 5 ms, same run"),
                 "wake_ms": distribution(times), "warm_ms": single(1000 * warm)},
                {"wake_ratio.value": "<= 1.1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--wake", action="store_true", help="on a GPU: an engine is parked and woken, too")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--pool-gib", type=int, default=40)
    parser.add_argument("--wakes", type=int, default=20)
    parser.add_argument("--crowd", action="store_true", help="many engines beside training, too")
    parser.add_argument("--only", choices=("proxy", "wake", "crowd"), help="that part alone")
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if has_cuda() else "host", help="of the crowd")
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--crowd-layers", type=int, default=8, help="of each")
    parser.add_argument("--crowd-pool", default="24GiB")
    parser.add_argument("--crowd-copies", default="90GiB", help="host copies")
    parser.add_argument("--crowd-job", default="gpt2-medium", help="what trains, on a GPU")
    parser.add_argument("--crowd-rate", type=float, default=2.0, help="requests a second, for all")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each run")
    args = parser.parse_args()
    clear_up_on_sigterm()
    parts = {args.only} if args.only else {"proxy", *(["wake"] if args.wake else []), *(["crowd"] if args.crowd else [])}
    cells = []
    if "proxy" in parts:
        cells += [measure_proxy(args.requests, args.streams, kept) for kept in (64, 0)]
    if "wake" in parts:
        cells.append(measure_wake(args.layers, args.width, args.pool_gib, args.wakes))
    if "crowd" in parts:
        cells.append(measure_crowd(args))
    write("engines", cells, gpus=int("wake" in parts or ("crowd" in parts and args.backend == "cuda")), accumulate=True)


if __name__ == "__main__":
    main()
