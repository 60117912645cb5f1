"""What it costs an engine to stand behind `sluice serve`, and how long it takes to be woken.

    ./benchmarks/run.sh engines [--requests 2000] [--streams 100]        # the proxy
    ./benchmarks/run.sh engines --wake [--layers 32] [--width 4096]     # besides: parked and woken
    ./benchmarks/run.sh engines --only wake --engine vllm [--model 1b] [--parks 200]
    ./benchmarks/run.sh engines --crowd [--backend host] [--engines 10]  # besides: many in a pool for few, beside training

`part=proxy`: the same engine (engines_server.py) is asked through the server and past it, in turns. `added_us` is what an exchange of a small
body takes through the server, less the median past it, with connections that are kept and (`kept_connections=0`) a new one for each; `first_byte_added_us` the same until the first event of a stream, and
`event_added_us` the same from when the engine sends an event until it is here.

`part=wake`: the example's engine, FastAPI and transformers as they are, with a model of so many layers, or (`--engine vllm`) vLLM's own server, with seeded
weights at the shape of Llama-3.2-1B. It is parked when it has been idle for a
moment; a request then waits until it is back. `wake_ratio` is the time until the first token, over what it takes at least: the bytes
that had gone by the rate of one plain copy of as many in the same run, the same request when it is warm, and 5 ms; `copied_ratio` leaves out those
that are zero, which are not copied. Its answers must be
the same each time, also after those of the `parks` whose waking is not timed.

`part=crowd`: engines_crowd.py.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from endpoint import PATIENCE_S, Server, environment_of
from engines_crowd import measure_crowd
from llm_server import PATH as COMPLETIONS
from llm_server import body as vllms_body
from llm_server import made_model, of_policy, tokens_of
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed, has_cuda

SLUICE = ROOT / "build" / "release" / "bin" / "sluice"
EXAMPLE = ROOT / "examples" / "engine" / "server.py"
GIB = 1 << 30
WARM_UP = 20
ALLOWANCE_S = 0.005
PROMPT = {"prompt": "Once upon a time", "max_tokens": 16, "stream": True}
IDLE_S = 0.3  # until it is parked


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


@dataclass(frozen=True)
class Woken:
    """An engine that is woken: its policy, what it is asked, and what of an answer's lines must always be the same."""

    name: str
    params: dict
    policy: dict
    body: dict
    heard: Callable[[list[str]], list]


def fastapi(layers: int, width: int) -> Woken:
    program = [sys.executable, str(EXAMPLE), "--port", "{port}", "--layers", str(layers), "--width", str(width)]
    return Woken("FastAPI and transformers", {"layers": layers, "width": width},
                 {"command": program, "ready": "/health", "routes": ["/v1/*"], "start": "at_boot", "start_timeout": "5m"}, PROMPT, lambda lines: lines)


def vllm(model: str, folder: Path, backend: str) -> Woken:
    return Woken("vLLM", {"model": model}, of_policy("engine", model, made_model(folder, model), backend), vllms_body("engine", 16, stream=True),
                 lambda lines: [token for line in lines for token in tokens_of(line)])


def first_token(server: Server, of: Woken) -> tuple[float, list]:
    """In seconds, and what the whole answer says."""
    client = http.client.HTTPConnection(*server.address, timeout=3 * PATIENCE_S)
    with contextlib.closing(client):
        began = time.monotonic()
        client.request("POST", COMPLETIONS, json.dumps(of.body), {"Content-Type": "application/json"})
        answer = client.getresponse()
        lines = [answer.readline().decode()]
        took = time.monotonic() - began
        if answer.status != 200:
            raise Failed(f"the engine answers {answer.status}: {lines[0]}")
        return took, of.heard(lines + [line.decode() for line in answer])


def copy_rate(size: int, backend: str) -> float:
    """Bytes a second of one plain copy to the device, of pinned memory; on the host of one within it."""
    import torch

    on_gpu = backend == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    block = torch.zeros(min(size, 2 * GIB), dtype=torch.uint8, pin_memory=on_gpu)
    there = block.cuda() if on_gpu else block.clone()
    best = 0.0
    for _ in range(3):
        wait()
        began = time.monotonic()
        there.copy_(block, non_blocking=True)
        wait()
        best = max(best, block.numel() / (time.monotonic() - began))
    return best


def await_parked(server: Server) -> dict:
    until = time.monotonic() + PATIENCE_S
    while (seen := state(server))["state"] != "parked":
        if time.monotonic() > until:
            raise Failed(f"the engine is not parked: {seen}")
        time.sleep(0.02)
    return seen


def zero_bytes(runtime: Path) -> int:
    """What is parked and nothing but zeros, which nobody copies."""
    said = subprocess.run([SLUICE, "status", "--json"], env=environment_of(runtime), check=True, capture_output=True).stdout
    return sum((client.get("parking") or {}).get("zero_bytes", 0) for client in json.loads(said)["clients"])


def measure_wake(args: argparse.Namespace) -> Cell:
    with tempfile.TemporaryDirectory() as name:
        of = vllm(args.model, Path(name) / "model", args.backend) if args.engine == "vllm" else fastapi(args.layers, args.width)
        engine = json.dumps({"name": "engine", "slo": {"latency": "5s"}, "warm": {"mode": "fixed", "max_idle": f"{IDLE_S}s"}, "engine": of.policy})
        with serving(Path(name), f"backend: {args.backend}, memory: {args.pool_gib}GiB", engine, f"host_copies: {{memory: {args.pool_gib}GiB}}\n") as server:
            _, wanted = first_token(server, of)
            warm = statistics.median(first_token(server, of)[0] for _ in range(5))
            ratios, of_copied, times, wrong = [], [], [], 0
            parks = max(args.wakes, args.parks)
            for number in range(parks):
                seen = await_parked(server)
                is_timed = number < args.wakes
                rate = copy_rate(seen["parked_bytes"], args.backend) if is_timed else math.inf
                copied = seen["parked_bytes"] - zero_bytes(Path(name) / "run")
                took, found = first_token(server, of)
                wrong += found != wanted
                if is_timed:
                    times.append(1000 * took)
                    ratios.append(took / (seen["parked_bytes"] / rate + warm + ALLOWANCE_S))
                    of_copied.append(took / (copied / rate + warm + ALLOWANCE_S))
    return Cell({"part": "wake", "engine": of.name, **of.params, "gib": round(seen["parked_bytes"] / GIB, 1), "left_gib": round(seen["resident_bytes"] / GIB, 2)},
                {"wake_ratio": single(statistics.median(ratios), "bytes by one plain copy's rate, warm service and 5 ms, same run"),
                 "copied_ratio": single(statistics.median(of_copied), "the same without the bytes that are zero, same run"),
                 "copied_bytes": single(copied), "wake_ms": distribution(times), "warm_ms": single(1000 * warm), "parks": single(parks), "wrong": single(wrong)},
                {"wake_ratio.value": "<= 1.1", "wrong.value": "<= 0"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--wake", action="store_true", help="an engine is parked and woken, too")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--pool-gib", type=int, default=40)
    parser.add_argument("--wakes", type=int, default=20, help="that are timed")
    parser.add_argument("--parks", type=int, default=0, help="in all, if they are more")
    parser.add_argument("--engine", choices=("fastapi", "vllm"), default="fastapi", help="that is woken")
    parser.add_argument("--model", choices=("tiny", "1b", "8b"), default="1b", help="vLLM's")
    parser.add_argument("--crowd", action="store_true", help="many engines beside training, too")
    parser.add_argument("--only", choices=("proxy", "wake", "crowd"), help="that part alone")
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if has_cuda() else "host", help="of the crowd, and of who is woken")
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
        cells.append(measure_wake(args))
    if "crowd" in parts:
        cells.append(measure_crowd(args))
    write("engines", cells, gpus=int(bool(parts - {"proxy"}) and args.backend == "cuda"), accumulate=True)


if __name__ == "__main__":
    main()
