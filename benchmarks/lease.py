"""What inference through the HTTP endpoint and training cost each other on one device.

    ./benchmarks/run.sh lease [--only cuda-vit-l-16-1] [--models bert-base] [--loads 10 50] [--systems sluice] [--seconds 6]
    ./benchmarks/run.sh lease --backend host --models tiny --only host-charlm-1      # tries it without a GPU
    ./benchmarks/run.sh lease --models fastapi --loads 10 50                         # an engine in the place of models

One server has all models warm, of which one is asked at a time: `bert-base` (half precision, one text of 128 tokens) and
`resnet50` (half precision, one image of 3x64x64, which the model enlarges to 224x224 itself, since bodies are JSON); `tiny`
are two that compute for 3 ms on a processor; `fastapi` is the example's engine, an unmodified server with FastAPI and transformers, and `vllm` is
vLLM's own server with seeded weights at the shape of Llama-3.2-1B; the cells of both are those of the record `engines` (`part=beside`). A load is a share of the rate that the server reaches without training
when a few connections ask without a pause; requests arrive by a Poisson process, the same for every system, and a latency
counts from its arrival. Cells of 10 % load take twice the seconds. Where a system cannot keep up, requests that were never
sent count with the time they had waited (`unsent_percent`).

A machine's pace drifts by more than the system costs. So each cell is measured in four turns with the same server: without
training (`infer-only`: the job rests between two steps), with it, with it, and without, the first half of the requests in
the first two turns and the second half in the others.

Systems: `sluice` (the device is training's but from the first launch of requests until the last has ended), `on_request` (but
while requests are in flight, and 2 ms longer), `time slicing` (training without Sluice beside a server with a pool of its own).
`training_ratio` is training's rate over its rate beside a server that nobody asks; of time slicing, over that without
Sluice. `idle_share` is what training has of the time that the requests leave, by how long the device is busy with the same
requests without training (`busy_percent`, as sluice's server counts it); at 90 % `lost_points` says it in points of the
whole time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from endpoint import Server, environment_of
from llm_server import PATH as ENGINE_PATH
from llm_server import body as vllms_body
from llm_server import made_model, of_policy
from overhead_models import WORKLOADS
from pairs import bootstrap
from progress import Progress
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed, has_cuda

#: What the policy says of the device beside inference, by system.
PAUSES = {"sluice": "pause: on_launch", "on_request": "pause: on_request, pause_hysteresis: 2ms"}
#: Where a server's status says how long requests have kept the device busy, under `pauses`.
BUSY = "busy_s"

INFER_ONLY, SLICING = "infer-only", "time slicing"
SYSTEMS = (*PAUSES, SLICING)
JOBS = {"cuda": ("cuda-gpt2-medium-1", "cuda-resnet50-1", "cuda-vit-l-16-1"), "host": ("host-charlm-1", "host-convnet-1")}
TRIED = {"cuda": JOBS["cuda"], "host": JOBS["host"][:1]}
MODELS = {"bert-base": ("bert-base",), "resnet50": ("resnet50",), "tiny": ("tiny-products", "tiny-tanh"), "fastapi": ("fastapi",), "vllm": ("vllm",)}
#: Engines: what they are asked, at ENGINE_PATH.
ENGINES = {"fastapi": {"prompt": "Once upon a time", "max_tokens": 16}, "vllm": vllms_body("vllm", 16, stream=False)}
FASTAPI = {"cuda": ("--layers", "8", "--width", "1024"), "host": ("--layers", "2", "--width", "128")}
VLLM = {"cuda": "1b", "host": "tiny"}
SERVED = {"cuda": ("bert-base", "resnet50"), "host": ("tiny",)}
INPUTS = {"fastapi": "16 bytes, 16 tokens", "vllm": "16 words, 16 tokens", "bert-base": "128 tokens", "resnet50": "3x64x64, enlarged in the model"}
LOADS = (10, 50, 90)
FULL = 90  # from this load on points are told, not a share

POOL = {"cuda": "44GiB", "host": "2GiB"}
POOL_OF_ITS_OWN = {"cuda": "2GiB", "host": "256MiB"}
RUN_AHEAD = "150us"
WARM_UP_REQUESTS = 60
WARM_UP_STEPS = {"cuda": 15, "host": 3}
SATURATING, CONNECTIONS = 4, 48
PATIENCE_S = 180.0
GRACE_S = 10.0
AFTER_S = 0.1  # the last burst is counted by then
BLOCKS = 20  # of requests that follow each other, which are drawn together
RESAMPLES = 200


@dataclass(frozen=True)
class Served:
    """What became of requests; `windows` are the times, monotonic nanoseconds, that they took."""

    latency_us: list[float]
    unsent: int
    windows: list[tuple[int, int]]
    busy_s: float = 0.0

    def __add__(self, later: Served) -> Served:
        return Served(self.latency_us + later.latency_us, self.unsent + later.unsent, self.windows + later.windows,
                      self.busy_s + later.busy_s)

    @property
    def seconds(self) -> float:
        return sum(ended - began for began, ended in self.windows) / 1e9

    @property
    def busy(self) -> float:
        """Share of the time."""
        return self.busy_s / self.seconds


@dataclass(frozen=True)
class Load:
    model: str
    percent: int
    rate: float
    seconds: float
    arrivals: list[float]

    def halves(self) -> tuple[Load, Load]:
        """By time."""
        half = self.seconds / 2
        parts = [at for at in self.arrivals if at < half], [at - half for at in self.arrivals if at >= half]
        first, second = (Load(self.model, self.percent, self.rate, half, part or [half / 2]) for part in parts)
        return first, second


def load_of(model: str, percent: int, saturated: float, seconds: float) -> Load:
    rate, seconds = saturated * percent / 100, seconds * (2 if percent <= 10 else 1)
    dice, arrivals, at = random.Random(f"{model} {percent}"), [], 0.0
    while (at := at + dice.expovariate(rate)) < seconds:
        arrivals.append(at)
    return Load(model, percent, rate, seconds, arrivals or [seconds / 2])


class Clients:
    """The process that asks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, ROOT / "benchmarks" / "lease_client.py"], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)

    def ask(self, server: Server, repository: Path, model: str, **how: object) -> Served:
        """Raises Failed for an answer that is none."""
        given = {"address": server.address, "path": ENGINE_PATH if model in ENGINES else f"/v2/models/{model}/infer", "body": str(repository / f"{model}.json"), **how}
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise Failed(f"the clients have ended with {self._process.wait()}")
        if "error" in (said := json.loads(line)):
            raise Failed(f"{model}: {said['error']}\n{server.log()}".rstrip())
        return Served(said["latency_us"], said["unsent"], [(said["began_ns"], said["ended_ns"])])

    def end(self) -> None:
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()


class Training:
    """A job. It has imported what it needs when it is told to begin."""

    def __init__(self, folder: Path, job: str, launcher: list, environment: dict[str, str]) -> None:
        folder.mkdir()
        self._folder, self._backend = folder, WORKLOADS[job].backend
        self.name = folder.name
        self.progress = Progress(folder / "steps")
        self._process = subprocess.Popen(
            [*launcher, sys.executable, ROOT / "benchmarks" / "beside_job.py", "--workload", job, "--parts", "--after",
             folder / "begin", "--until", folder / "enough", "--rest", folder / "rest", "--steps", folder / "steps",
             *(["--shared"] if launcher else [])],
            stdin=subprocess.DEVNULL, env=environment)
        self._shares = [1.0]
        self.alone = 0.0

    def begin(self, seconds: float) -> None:
        """Until it has warmed up, and its rate alone is known."""
        (self._folder / "begin").touch()
        self._wait(lambda steps: len(steps) >= WARM_UP_STEPS[self._backend])
        began = time.monotonic_ns()
        ended = began + int(1e9 * seconds)
        self._wait(lambda steps: steps[-1][-1] > ended)
        self._shares = self.progress.shares(began, ended)
        self.alone = self.progress.rate(began, ended, self._shares)

    def rate(self, served: Served) -> float:
        """Steps a second while these requests were."""
        self.progress.wait_beyond(served.windows[-1][1], self._process.poll, PATIENCE_S)
        done = sum(self.progress.rate(*window, self._shares) * (window[1] - window[0]) / 1e9 for window in served.windows)
        return done / served.seconds

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """It has ended a step and begins no other."""
        rest = self._folder / "rest"
        reached = rest.with_suffix(".reached")
        rest.touch()
        self.progress.wait(lambda _steps: reached.exists(), self._process.poll, PATIENCE_S)
        yield
        rest.unlink()
        self.progress.wait(lambda _steps: not reached.exists(), self._process.poll, PATIENCE_S)
        self.progress.wait_beyond(time.monotonic_ns(), self._process.poll, PATIENCE_S)

    def _wait(self, enough: Callable[[list[list[int]]], bool]) -> None:
        self.progress.wait(enough, self._process.poll, PATIENCE_S)

    def end(self) -> None:
        (self._folder / "enough").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._process.terminate()
        self._process.wait()


class Stage:
    """A folder with the models, a pool with its server, and the jobs. All processes have ended when it is left."""

    def __init__(self, options: argparse.Namespace, models: list[str]) -> None:
        self._options, self._models = options, models
        self._program = ROOT / "build" / options.preset / "bin" / "sluice"
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        self._folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="sluice-lease-")))
        self.repository = self._folder / "models"
        self._servers: dict[str, Server] = {}
        self._jobs: list[Training] = []
        self.clients = Clients()
        return self

    def __exit__(self, *_why: object) -> None:
        for job in self._jobs:
            job.end()
        for runtime in [*self._servers]:
            self.end_server(runtime)
        for runtime in ("run", "own"):
            self._end_broker(runtime)
        self.clients.end()
        self._ends.close()

    def write_models(self) -> None:
        self.repository.mkdir()
        for name, body in ENGINES.items():
            (self.repository / f"{name}.json").write_text(json.dumps(body), encoding="utf-8")
        if "vllm" in self._models:
            made_model(self._folder / "vllm", VLLM[self._options.backend])
        if models := [each for each in self._models if each not in ENGINES]:
            subprocess.run([sys.executable, ROOT / "benchmarks" / "lease_models.py", self.repository, *models], check=True)

    def _runtime(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _environment(self, runtime: str) -> dict[str, str]:
        return environment_of(self._runtime(runtime), SLUICE_BROKER=str(self._program), SLUICE_LOG="warn")

    def prepare(self, job: str, shared: bool) -> Training:
        """A job that has not begun."""
        launcher = [self._program, "run", "--backend", self._options.backend, "--runtime-dir", self._runtime("run"), "--memory",
                    self._options.memory, "--require-pool", "--name", job, "--"] if shared else []
        folder = self._folder / (job + (" shared" if shared else " plain"))
        self._jobs.append(Training(folder, job, launcher, self._environment("run")))
        return self._jobs[-1]

    def serve(self, runtime: str, pause: str, memory: str) -> Server:
        """A server in the pool of that folder, instead of one that is there. Raises Failed."""
        if runtime in self._servers:
            self.end_server(runtime)
        policy = self._folder / f"{runtime}.yaml"
        memory_of_engines = "own" if runtime == "own" else "pool"
        warm = {name: "" if name in ENGINES and memory_of_engines == "own" else "warm: {mode: always}, " for name in self._models}
        models = "".join(f"  - {{name: {name}, slo: {{latency: 100ms}}, {warm[name]}max_queue: 100000"
                         f"{self._engine(name, memory_of_engines) if name in ENGINES else ''}}}\n" for name in self._models)
        repository = "" if all(name in ENGINES for name in self._models) else f"model_repository: {self.repository}, "
        policy.write_text(
            f"version: 1\nserver: {{{repository}request_timeout: 1m}}\n"
            f"pool: {{backend: {self._options.backend}, memory: {memory}}}\n"
            f"training: {{{pause}, run_ahead: {self._options.run_ahead}}}\nmodels:\n{models}", encoding="utf-8")
        server = Server(self._program, policy, self._environment(runtime), self._folder / f"{runtime}.log")
        self._servers[runtime] = server
        server.listen()
        for model in self._models:
            for together in (1, SATURATING):
                self.clients.ask(server, self.repository, model, connections=together, closed_s=0.0)
            warm = 0
            while warm < WARM_UP_REQUESTS:
                warm += len(self.clients.ask(server, self.repository, model, connections=2, closed_s=0.25).latency_us)
        return server

    def _engine(self, name: str, memory: str) -> str:
        """The rest of its line in the policy."""
        backend = self._options.backend
        if name == "vllm":
            engine = of_policy(name, VLLM[backend], self._folder / "vllm", backend)
        else:
            program = [sys.executable, str(ROOT / "examples" / "engine" / "server.py"), *FASTAPI[backend], "--port", "{port}"]
            engine = {"command": program, "ready": "/health", "routes": ["/v1/*"], "start": "at_boot", "start_timeout": "3m"}
        return f", engine: {json.dumps({**engine, 'memory': memory})}"

    def end_server(self, runtime: str) -> None:
        self._servers.pop(runtime).end()

    def _end_broker(self, runtime: str) -> None:
        with contextlib.suppress(OSError):  # it goes by itself when nobody needs it
            end_broker(self._folder / runtime)

    def end_pool(self) -> None:
        """The pool that is shared gives its memory back."""
        if "run" in self._servers:
            self.end_server("run")
        self._end_broker("run")

    def longest_unit(self, job: str) -> tuple[str, float]:
        """Of the job under Sluice: what takes longest without a chance to pause; nothing where all is short."""
        asked = subprocess.run([self._program, "status", "--json"], env=self._environment("run"), capture_output=True, text=True,
                               check=False)
        if asked.returncode != 0:
            raise Failed(f"sluice status has ended with {asked.returncode}: {asked.stderr.strip()}")
        units = [(unit["name"], float(unit["us"])) for client in json.loads(asked.stdout)["clients"] if client["name"] == job
                 for unit in client.get("long_units") or []]
        return max(units, key=lambda unit: unit[1], default=("", 0.0))

    def saturate(self, server: Server, model: str, seconds: float) -> float:
        """Requests a second that are answered where nobody pauses."""
        served = self.clients.ask(server, self.repository, model, connections=SATURATING, closed_s=seconds)
        return len(served.latency_us) / served.seconds

    def answer(self, server: Server, load: Load) -> Served:
        """The requests of a load."""
        before = busy_of(server)
        served = self.clients.ask(server, self.repository, load.model, connections=CONNECTIONS, arrivals=load.arrivals,
                                  seconds=load.seconds, grace_s=max(1.0, load.seconds / 5))
        time.sleep(AFTER_S)
        return Served(served.latency_us, served.unsent, served.windows, busy_of(server) - before)

    def answer_in_turns(self, server: Server, load: Load, training: Training) -> tuple[Served, Served]:
        """The requests of a load while training rests, and beside it."""
        first, second = load.halves()
        with training.resting():
            alone = self.answer(server, first)
        beside = self.answer(server, first) + self.answer(server, second)
        with training.resting():
            alone += self.answer(server, second)
        return alone, beside


def busy_of(server: Server) -> float:
    return server.status()["pauses"][BUSY]


class Results:
    """Cells, each beside what inference alone was in turns with it."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self._busy: dict[tuple[str, str, int], float] = {}  # by job, model and load; only a server of `sluice` counts it

    def infer_only(self, load: Load, alone: Served, job: str, system: str) -> None:
        metrics = {"latency_us": distribution(alone.latency_us), "offered_per_s": single(load.rate)}
        if system == next(iter(PAUSES)):
            self._busy[job, load.model, load.percent] = alone.busy
            metrics["busy_percent"] = single(100 * alone.busy)
        self.cells.append(Cell({**self._params(load, job, INFER_ONLY), "server_of": system}, metrics))

    def beside(self, load: Load, alone: Served, served: Served, job: str, system: str, training_ratio: float,
               unit: tuple[str, float]) -> None:
        base, seen = distribution(alone.latency_us), distribution(served.latency_us)
        how = "infer-only, same run"
        metrics = {"latency_us": seen, **{
            f"{part}_ratio": single(seen[part] / base[part], how, interval(alone.latency_us, served.latency_us, share))
            for part, share in (("p50", 0.5), ("p99", 0.99))}}
        metrics["training_ratio"] = single(training_ratio, "training alone, same run")
        targets = {"p50_ratio.value": "<= 1.05", "p99_ratio.value": "<= 1.1"}
        if served.unsent:
            metrics["unsent_percent"] = single(100 * served.unsent / len(served.latency_us))
        busy = self._busy.get((job, load.model, load.percent))
        if busy is not None:
            metrics["busy_percent"] = single(100 * busy, "of infer-only, same run")
        if busy is not None and load.percent >= FULL:
            metrics["lost_points"] = single(100 * (1 - busy - training_ratio))
            targets["lost_points.value"] = "<= 3"
        elif busy is not None and busy < 1:
            metrics["idle_share"] = single(training_ratio / (1 - busy), how)
            targets["idle_share.value"] = ">= 0.9" if load.model == "vllm" else ">= 0.95"
        if unit[0]:
            metrics["longest_unit_us"] = {**single(unit[1]), "name": unit[0]}
            if unit[1] > base["p50"] / 10:
                targets["p99_ratio.value"] = "<= 1.3"
        self.cells.append(Cell(self._params(load, job, system), metrics, targets if system == "sluice" else {}))

    @staticmethod
    def _params(load: Load, job: str, system: str) -> dict:
        more = {"input": INPUTS[load.model]} if load.model in INPUTS else {}
        return {"model": load.model, **more, "load_percent": load.percent, "job": job, "system": system}


def interval(alone: list[float], beside: list[float], share: float) -> tuple[float, float]:
    """95 % of the quotient of two quantiles of the same arrivals, by drawing requests that follow each other together."""
    length = max(1, math.ceil(len(alone) / BLOCKS))
    blocks = [(sorted(alone[at:at + length]), sorted(beside[at:at + length])) for at in range(0, len(alone), length)]

    def quantile(parts: list[list[float]]) -> float:
        ordered = sorted(each for part in parts for each in part)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def drawn(dice: random.Random) -> float:
        chosen = dice.choices(blocks, k=len(blocks))
        return quantile([each[1] for each in chosen]) / quantile([each[0] for each in chosen])

    return bootstrap(drawn, RESAMPLES)


def say(what: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {what}", file=sys.stderr, flush=True)


BEGAN = time.monotonic()


def measure(stage: Stage, options: argparse.Namespace, models: list[str], results: Results) -> None:
    """Raises Failed."""
    pooled = [each for each in options.systems if each in PAUSES]
    alone_s = 0.6 * options.seconds
    jobs = {(job, shared): stage.prepare(job, shared) for job in options.only
            for shared, wanted in ((True, pooled), (False, SLICING in options.systems)) if wanted}
    stage.write_models()
    say("the models are written")
    system = pooled[0] if pooled else next(iter(PAUSES))
    server = stage.serve("run", PAUSES[system], options.memory)
    say("the server is warm")
    loads = []
    for model in models:
        rate = stage.saturate(server, model, max(1.5, options.seconds / 3))
        say(f"{model}: {rate:.0f} requests a second at most")
        loads += [load_of(model, percent, rate, options.seconds) for percent in options.loads]

    def cells(job: str, training: Training, of: str, at: Server) -> None:
        seen = [(load, *stage.answer_in_turns(at, load, training)) for load in loads]
        unit = stage.longest_unit(job) if of in PAUSES else ("", 0.0)
        for load, alone, beside in seen:
            results.infer_only(load, alone, job, of)
            results.beside(load, alone, beside, job, of, training.rate(beside) / training.alone, unit)
        say(f"{job}, {of} done")

    for job in options.only if pooled else ():
        training = jobs[job, True]
        training.begin(alone_s)
        say(f"{job} under Sluice makes {training.alone:.2f} steps a second")
        for of in sorted(pooled, key=lambda each: each != system):  # the server that is there first
            if of != system:
                server, system = stage.serve("run", PAUSES[of], options.memory), of
                say(f"the server is warm again, {of}")
            cells(job, training, of, server)
        training.end()
    if SLICING in options.systems:
        stage.end_pool()
        server = stage.serve("own", "pause: never", POOL_OF_ITS_OWN[options.backend])
        say("the server with a pool of its own is warm")
        for job in options.only:
            training = jobs[job, False]
            training.begin(alone_s)
            say(f"{job} without Sluice makes {training.alone:.2f} steps a second")
            cells(job, training, SLICING, server)
            training.end()


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--only", nargs="+", choices=[job for jobs in JOBS.values() for job in jobs], help="jobs")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--loads", nargs="+", type=int, choices=LOADS, default=[*LOADS], help="percent")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each cell; twice of 10 %% load (default %(default)s)")
    parser.add_argument("--memory", help=f"of the pool (default {POOL['cuda']}, on the host {POOL['host']})")
    parser.add_argument("--run-ahead", default=RUN_AHEAD, help="as in the policy (default %(default)s)")
    parser.add_argument("--preset", default="release")
    options = parser.parse_args(arguments)
    options.backend = options.backend or ("cuda" if has_cuda() else "host")
    options.only = options.only or [*TRIED[options.backend]]
    options.models = options.models or [*SERVED[options.backend]]
    options.memory = options.memory or POOL[options.backend]
    if wrong := [job for job in options.only if job not in JOBS[options.backend]]:
        parser.error(f"{', '.join(wrong)} is not for the backend {options.backend}")
    return options


@contextlib.contextmanager
def written(results: Results, options: argparse.Namespace) -> Iterator[None]:
    """Whatever was measured is written, also if the rest fails or there is no time for it."""
    try:
        yield
    finally:
        of_engines = [cell for cell in results.cells if cell.params["model"] in ENGINES]
        for name, cells in (("lease", [cell for cell in results.cells if cell not in of_engines]),
                            ("engines", [replace(cell, params={"part": "beside", **cell.params}) for cell in of_engines])):
            if cells:
                write(name, cells, gpus=int(options.backend == "cuda"), accumulate=True)


def main() -> int:
    options = options_of()
    clear_up_on_sigterm()
    models = [name for each in options.models for name in MODELS[each]]
    results = Results()
    try:
        with written(results, options), Stage(options, models) as stage:
            measure(stage, options, models, results)
    except Failed as failure:
        raise SystemExit(f"lease: {failure}") from failure
    say("written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
