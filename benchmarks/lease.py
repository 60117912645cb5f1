"""What inference through the endpoint and training cost each other on one device.

    ./benchmarks/run.sh lease [--only cuda-resnet50-1] [--systems sluice] [--loads 10 50 90] [--seconds 4]

Each inference model alone first: how many requests a second it can have answered, then shares of that as a Poisson process
(`infer-only`). Then the same arrivals beside each training job, under `sluice` (training is held while inference is on the
device), `on_request` (while requests are in flight, and 2 ms longer), and `time slicing` (a plain process beside the
server). Both models are warm all the time, one of them is asked.

`idle_share` is training's rate over its rate alone at the same memory, divided by the share of time that infer-only leaves
idle: the device is busy from a first launch until all is done, gaps under 200 µs joined, as the server's status counts it.
At 90 % load little is idle, and `lost_points` are what is lost of training's rate alone instead, in percent of it. Latencies
compare with infer-only. Bodies are JSON: `resnet50` takes an image of 64 × 64 and enlarges it on the device.

With `--backend host` small models and a small job stand in for the real ones, to try the benchmark itself.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brokers import clear_up_on_sigterm
from overhead_models import WORKLOADS
from records import ROOT, Cell, distribution, single, write
from served import PATIENCE_S, Client, Failed, add_model, serving

SYSTEMS = ("sluice", "on_request", "time slicing")
PAUSES = {"sluice": "{pause: on_launch}", "on_request": "{pause: on_request, pause_hysteresis: 2ms}",
          "time slicing": "{pause: never}"}
JOBS = {"cuda": ("cuda-gpt2-medium-1", "cuda-resnet50-1", "cuda-vit-l-16-1"), "host": ("host-charlm-1",)}
POOLS = {"cuda": ("44GiB", "4GiB"), "host": ("1GiB", "256MiB")}
LOADS = (10, 50, 90)
WARM_UP_REQUESTS, WARM_UP_STEPS = 100, 20
SATURATING_CONNECTIONS = 4
SIDE = 64
HIGHEST_LOAD = 90


@dataclass(frozen=True)
class Model:
    name: str
    path: str
    body: bytes


def body_of(name: str, datatype: str, shape: list[int], data: list) -> bytes:
    return json.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}]}).encode()


def models_on_cuda(repository: Path) -> Iterator[Model]:
    import torch
    import torchvision
    from transformers import BertConfig, BertModel

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(BertConfig())

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.bert(ids)[1].float()

    class Enlarged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torchvision.models.resnet50()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.body(torch.nn.functional.interpolate(image.half(), [224, 224])).float()

    def traced(module: torch.nn.Module, example: torch.Tensor) -> torch.jit.ScriptModule:
        with torch.inference_mode():
            return torch.jit.trace(module.eval().half().cuda(), example.cuda(), strict=False, check_trace=False).cpu()

    add_model(repository, "bert-base", traced(Pooled(), torch.zeros(1, 128, dtype=torch.int64)),
              'name: "ids" data_type: TYPE_INT64 dims: [ 1, 128 ]', 'name: "pooled" data_type: TYPE_FP32 dims: [ 1, 768 ]')
    yield Model("bert-base", "/v2/models/bert-base/infer", body_of("ids", "INT64", [1, 128], list(range(128))))
    add_model(repository, "resnet50", traced(Enlarged(), torch.rand(1, 3, SIDE, SIDE)),
              f'name: "image" data_type: TYPE_FP32 dims: [ 1, 3, {SIDE}, {SIDE} ]',
              'name: "scores" data_type: TYPE_FP32 dims: [ 1, 1000 ]')
    yield Model("resnet50", "/v2/models/resnet50/infer",
                body_of("image", "FP32", [1, 3, SIDE, SIDE], [round(i % 97 / 97, 2) for i in range(3 * SIDE * SIDE)]))
    torch.cuda.empty_cache()


def models_on_host(repository: Path) -> Iterator[Model]:
    import torch

    class Products(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.eye(128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(40):
                x = x @ self.matrix
            return x

    add_model(repository, "products", torch.jit.script(Products()), 'name: "x" data_type: TYPE_FP32 dims: [ 64, 128 ]',
              'name: "y" data_type: TYPE_FP32 dims: [ 64, 128 ]')
    yield Model("products", "/v2/models/products/infer", body_of("x", "FP32", [64, 128], [0.5] * (64 * 128)))


@dataclass(frozen=True)
class Answered:
    latency_us: list[float]
    began_ns: int
    ended_ns: int
    busy_s: float

    @property
    def busy_share(self) -> float:
        return 1e9 * self.busy_s / (self.ended_ns - self.began_ns)


def ask(address: tuple[str, int], model: Model, seconds: float, rate: float = 0.0, connections: int = 16) -> Answered:
    status = Client(address)
    before = status.status()["pauses"]["busy_s"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "lease_client.py", "--host", address[0], "--port", str(address[1]), "--path",
         model.path, "--seconds", str(seconds), "--rate", str(rate), "--connections", str(connections)],
        input=model.body, capture_output=True, check=False, timeout=PATIENCE_S)
    if done.returncode != 0:
        raise Failed(done.stderr.decode() or f"the client ended with {done.returncode}")
    return Answered(**json.loads(done.stdout), busy_s=status.status()["pauses"]["busy_s"] - before)


class Training:
    """A job that writes the instant of each step's end, under Sluice or plain."""

    def __init__(self, workload: str, folder: Path, shared: bool) -> None:
        self._folder = folder
        self._steps = folder / f"steps-{workload}-{shared}"
        self._enough = folder / f"enough-{workload}-{shared}"
        binaries = ROOT / "build" / "release" / "bin"
        launcher = [binaries / "sluice", "run", "--backend", WORKLOADS[workload].backend, "--runtime-dir", folder / "run",
                    "--require-pool", "--"] if shared else []
        self._process = subprocess.Popen(
            [*launcher, sys.executable, ROOT / "benchmarks" / "beside_job.py", "--workload", workload, "--until", self._enough,
             "--steps", self._steps, *(["--shared"] if shared else [])], env={**os.environ, "SLUICE_BROKER": str(binaries / "sluice")})

    def __enter__(self) -> Training:
        self._wait_for(lambda ends: len(ends) >= WARM_UP_STEPS)
        return self

    def __exit__(self, *_why: object) -> None:
        self._enough.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.terminate()
        self._process.wait()

    def alone(self, seconds: float) -> float:
        """Steps a second of the next so many seconds."""
        began = time.monotonic_ns()
        return self.rate(began, began + int(1e9 * seconds))

    def rate(self, began_ns: int, ended_ns: int) -> float:
        """Steps a second between two instants; of those that lie across, the part that lies within."""
        ends = self._wait_for(lambda found: found[-1] > ended_ns)

        def done_at(instant: int) -> float:
            after = bisect.bisect_right(ends, instant)
            return after + (instant - ends[after - 1]) / (ends[after] - ends[after - 1])

        return 1e9 * (done_at(ended_ns) - done_at(began_ns)) / (ended_ns - began_ns)

    def _wait_for(self, enough) -> list[int]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = self._steps.read_text(encoding="utf-8") if self._steps.exists() else ""
            ends = [int(line) for line in text.split("\n")[:-1]]
            if ends and enough(ends):
                return ends
            if (status := self._process.poll()) is not None:
                raise Failed(f"training ended with {status}")
            if time.monotonic() > deadline:
                raise Failed(f"training has made {len(ends)} steps in {PATIENCE_S:.0f} s")
            time.sleep(0.02)


def longest_unit(folder: Path) -> dict:
    """What training launches that takes longest, as its server's pool knows it."""
    said = subprocess.run([ROOT / "build" / "release" / "bin" / "sluice", "status", "--json", "--runtime-dir", folder / "run"],
                          capture_output=True, check=True)
    units = [unit for client in json.loads(said.stdout)["clients"] for unit in client.get("long_units") or []]
    return max(units, key=lambda unit: unit["us"], default={})


def cell_of(params: dict, seen: Answered, base: Answered, training_ratio: float, longest_us: float) -> Cell:
    latency, alone = distribution(seen.latency_us), distribution(base.latency_us)
    how = "infer-only, same run"
    idle = 1.0 - base.busy_share
    metrics = {"latency_us": latency, "p50_ratio": single(latency["p50"] / alone["p50"], how),
               "p99_ratio": single(latency["p99"] / alone["p99"], how),
               "training_ratio": single(training_ratio, "alone at the same memory, same run")}
    if params["load_percent"] >= HIGHEST_LOAD:
        metrics["lost_points"] = single(100 * (idle - training_ratio), how)
        target = {"lost_points.value": "<= 3"}
    else:
        metrics["idle_share"] = single(training_ratio / idle, how)
        target = {"idle_share.value": ">= 0.95"}
    is_long = longest_us > alone["p50"] / 10
    targets = {**target, "p50_ratio.value": "<= 1.05", "p99_ratio.value": "<= 1.3" if is_long else "<= 1.1"}
    return Cell(params, metrics, targets if params["system"] == "sluice" else {})


def seconds_of(load: int, args: argparse.Namespace) -> float:
    """At little load requests are few: those cells last longer."""
    return args.seconds * (2 if load < 30 else 1)


class Run:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._began = time.monotonic()
        make = models_on_cuda if args.backend == "cuda" else models_on_host
        self.models = [each for each in make(folder / "models") if not args.models or each.name in args.models]
        self.base: dict[tuple[str, int], Answered] = {}
        self.rates: dict[str, float] = {}
        self.cells: list[Cell] = []

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def server(self, system: str, memory: str) -> Iterator[tuple[str, int]]:
        served = "".join(f"  - {{name: {each.name}, slo: {{latency: 5s}}, warm: {{mode: always}}, max_queue: 1024}}\n"
                         for each in self.models)
        policy = (f"version: 1\nserver: {{model_repository: {self._folder / 'models'}}}\n"
                  f"pool: {{backend: {self._args.backend}, memory: {memory}}}\ntraining: {PAUSES[system]}\nmodels:\n{served}")
        with serving(self._folder, policy, ends_broker=False) as address:
            client = Client(address)
            for model in self.models:
                for _ in range(WARM_UP_REQUESTS):
                    client.ask(model.path, model.body)
            yield address

    def infer_only(self, memory: str) -> None:
        with self.server("sluice", memory) as address:
            for model in self.models:
                found = ask(address, model, self._args.seconds, connections=SATURATING_CONNECTIONS)
                self.rates[model.name] = len(found.latency_us) / (1e-9 * (found.ended_ns - found.began_ns))
                for load in self._args.loads:
                    base = ask(address, model, seconds_of(load, self._args), self.rates[model.name] * load / 100)
                    self.base[model.name, load] = base
                    self.cells.append(Cell(
                        {"model": model.name, "load_percent": load, "job": "none", "system": "infer-only"},
                        {"latency_us": distribution(base.latency_us), "busy_percent": single(100 * base.busy_share),
                         "rate_per_s": single(self.rates[model.name] * load / 100)}))
                self.say(f"{model.name} alone: {self.rates[model.name]:.0f} requests/s")

    def beside(self, job: str, system: str, training: Training, address: tuple[str, int]) -> None:
        alone = training.alone(self._args.seconds)
        shared = system != "time slicing"
        longest = longest_unit(self._folder) if shared else {}
        named = {"longest_unit": longest["name"][:60], "longest_unit_us": round(longest["us"])} if longest else {}
        for model in self.models:
            for load in self._args.loads:
                seen = ask(address, model, seconds_of(load, self._args), self.rates[model.name] * load / 100)
                ratio = training.rate(seen.began_ns, seen.ended_ns) / alone
                cell = cell_of({"model": model.name, "load_percent": load, "job": job, "system": system, **named}, seen,
                               self.base[model.name, load], ratio, longest.get("us", 0.0))
                self.cells.append(cell)
                of = cell.metrics.get("idle_share") or cell.metrics["lost_points"]
                self.say(f"{model.name} at {load} % beside {job}, {system}: training {ratio:.3f}, {of['value']}, p50 "
                         f"{cell.metrics['p50_ratio']['value']}, p99 {cell.metrics['p99_ratio']['value']}")

    def all(self) -> None:
        pool, small = POOLS[self._args.backend]
        self.infer_only(pool)
        for job in self._args.only:
            within = [each for each in self._args.systems if each != "time slicing"]
            with contextlib.ExitStack() as job_ends:
                training = None
                for system in within:
                    with self.server(system, self._args.memory or pool) as address:
                        training = training or job_ends.enter_context(Training(job, self._folder, shared=True))
                        self.beside(job, system, training, address)
            if "time slicing" in self._args.systems:
                with self.server("time slicing", small) as address, Training(job, self._folder, shared=False) as training:
                    self.beside(job, "time slicing", training, address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=JOBS, default="cuda")
    parser.add_argument("--only", nargs="*", help="jobs, instead of all")
    parser.add_argument("--models", nargs="*", help="inference models, instead of all")
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--loads", nargs="*", type=int, default=[*LOADS], help="in percent of what each model can answer")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--memory", help="of the pool that training shares")
    args = parser.parse_args()
    args.only = args.only or [*JOBS[args.backend]]
    clear_up_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="sluice-lease-") as name:
        run = Run(args, Path(name))
        try:
            run.all()
        finally:
            if run.cells:
                write("lease", run.cells, gpus=1 if args.backend == "cuda" else 0, accumulate=True)


if __name__ == "__main__":
    main()
