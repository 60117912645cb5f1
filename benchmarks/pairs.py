"""Plain PyTorch and one thing of Sluice's, step for step, and the command line of the benchmarks that compare them.

Two processes do the same work in turn, so that drift of the machine falls on both alike. Both live all the time but only
one runs at once: in turn each is told to make so many steps, which is a window; the order within a pair of windows
changes from pair to pair. What is compared is the median of the pairs' ratios; its interval comes from resampling pairs.

Two processes that do the same differ, too, for as long as they live: by where their threads and their memory lie. Work that the
host bounds shows that. With several jobs, one couple of processes after another, the median is over the couples', and what is
resampled is couples, and pairs in each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overhead_models import WORKLOADS, Workload  # also finds the examples
from records import Cell, distribution, single

from demonstration.processes import Failed, Stage, has_cuda

ROOT = Path(__file__).resolve().parent.parent
POOL = {"host": "3GiB", "cuda": "64GiB"}

WARM_UP_STEPS = 6
LIMIT_SECONDS = 600.0  # for one answer of a worker


def answer(step: Callable[[], None], synchronize: Callable[[], None], more: Callable[[], dict] = dict) -> None:
    """The process that is measured: reads numbers of steps from standard input; answers each with the seconds that they
    took, and with what `more` says then. `synchronize` waits for what has been started."""
    for line in sys.stdin:
        synchronize()
        started = time.perf_counter()
        for _ in range(int(line)):
            step()
        synchronize()
        print(json.dumps({"seconds": time.perf_counter() - started, **more()}), flush=True)


class Worker:
    """The other end of `answer`."""

    def __init__(self, stage: Stage, name: str, command: list) -> None:
        self._stage = stage
        self._process: subprocess.Popen = stage.start(name, command, captured=True, fed=True)

    def run(self, steps: int | str, limit_seconds: float = LIMIT_SECONDS) -> dict:
        """The answer to one line. Throws `Failed` if the process ends, or does not answer in time."""
        try:
            self._process.stdin.write(f"{steps}\n".encode())
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(limit_seconds):
                    raise self._stage.failure(self._process, f"did not answer within {limit_seconds:.0f} s")
            said = self._process.stdout.readline()
        except BrokenPipeError:
            said = b""
        if not said:
            raise self._stage.failure(self._process, f"ended with status {self._process.wait(LIMIT_SECONDS)}")
        return json.loads(said)


def in_turn(workers: dict[str, Worker], pairs: int, window: float,
            free_bytes: Callable[[], int] | None = None) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Milliseconds of a step by worker and window of at least so many seconds, and the workers' last answers; with
    `taken_bytes`, by how much `free_bytes` has become less while a worker made its steps, if that is given."""
    taken = dict.fromkeys(workers, 0)

    def run(name: str, steps: int) -> dict:
        if free_bytes is None:
            return workers[name].run(steps)
        before = free_bytes()
        said = workers[name].run(steps)
        taken[name] += before - free_bytes()
        return said | {"taken_bytes": taken[name]}

    for worker in workers.values() if free_bytes else ():
        worker.run(0)  # it is there, and has taken what it needs for that
    for name in workers:
        run(name, WARM_UP_STEPS)
    pace = max(run(name, 2)["seconds"] / 2 for name in workers)
    steps = max(1, math.ceil(window / pace))
    ms: dict[str, list[float]] = {name: [] for name in workers}
    last: dict[str, dict] = {}
    for pair in range(pairs):
        for name in workers if pair % 2 == 0 else reversed(workers):
            last[name] = run(name, steps)
            ms[name].append(last[name]["seconds"] / steps * 1e3)
    return ms, last


def typical(ratios: list[list[float]]) -> float:
    """By couple of processes: the median of each one's median of paired ratios."""
    return statistics.median(statistics.median(of) for of in ratios)


def bootstrap(drawn: Callable[[random.Random], float], resamples: int = 4000) -> tuple[float, float]:
    """95 % interval of what `drawn` finds in one resample."""
    dice = random.Random(0)
    found = sorted(drawn(dice) for _ in range(resamples))
    return found[int(0.025 * resamples)], found[int(0.975 * resamples) - 1]


def interval(ratios: list[list[float]]) -> tuple[float, float]:
    """Of what is typical of them."""
    return bootstrap(lambda dice: typical([dice.choices(of, k=len(of)) for of in dice.choices(ratios, k=len(ratios))]))


@dataclass(frozen=True)
class Comparison:
    """A benchmark of this kind: a program that measures, and is itself the process that is measured.

    `more` gets the workload and the last answer of both workers ("plain" and `other`), and returns metrics of its own and
    the cell's targets. It may raise `Failed`. `free_bytes`: see `in_turn`; called on CUDA alone.
    """

    name: str
    description: str
    program: Path
    other: str  # what is not plain torch, as metrics name it
    workloads: tuple[str, ...]
    pairs: int
    more: Callable[[Workload, dict[str, dict]], tuple[dict, dict]]
    free_bytes: Callable[[], int] | None = None

    def options(self, add_own: Callable[[argparse.ArgumentParser], None] = lambda _parser: None) -> argparse.Namespace:
        """The command line, with what the benchmark adds of its own. With `worker`, a key of WORKLOADS, this process is one that is
        measured, and `shared` says that it is the other one."""
        parser = argparse.ArgumentParser(description=self.description)
        parser.add_argument("--backend", choices=["auto", "host", "cuda"], default="auto")
        parser.add_argument("--only", choices=self.workloads, action="append", help="measure this alone; may be repeated")
        parser.add_argument("--pairs", type=int, default=self.pairs, help="of windows (default %(default)s)")
        parser.add_argument("--window", type=float, default=2.0, metavar="SECONDS", help="at least (default %(default)s)")
        parser.add_argument("--jobs", type=int, default=1, help="couples of processes, one after another (default %(default)s)")
        parser.add_argument("--memory", help=f"of the pool (default {POOL['cuda']}, on the host {POOL['host']})")
        parser.add_argument("--sluice", type=Path, default=ROOT / "build" / "release" / "bin" / "sluice")
        parser.add_argument("--worker", choices=self.workloads, help=argparse.SUPPRESS)
        parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
        add_own(parser)
        options = parser.parse_args()
        if not options.worker and options.pairs < 2:
            parser.error("--pairs must be at least 2")
        if options.jobs < 1:
            parser.error("--jobs must be at least 1")
        if not options.worker and not options.sluice.exists():
            parser.error(f"there is no {options.sluice}; run ./scripts/build.sh")
        return options

    def measured(self, options: argparse.Namespace, each: Callable[[Cell], None] = lambda _cell: None) -> dict:
        """Measures what the command line asks for; what `write` is to be told. `each` is given every cell at once. Raises
        SystemExit if that fails."""
        backend = options.backend if options.backend != "auto" else "cuda" if has_cuda() else "host"
        cells, notes = [], []
        for key in self.workloads:
            workload = WORKLOADS[key]
            if workload.backend != backend or (options.only and key not in options.only):
                continue
            missing = [name for name in workload.packages if importlib.util.find_spec(name) is None]
            if missing:
                notes.append(f"{key} is left out: {', '.join(missing)} is not installed")
                continue
            print(f"==> {key}", flush=True)
            try:
                cells.append(self._cell(key, options))
                each(cells[-1])
            except Failed as failure:
                raise SystemExit(f"{self.name}: {failure}") from failure
        if not cells:
            raise SystemExit("\n".join([f"{self.name}: nothing was measured", *notes]))
        return {"cells": cells, "gpus": 1 if backend == "cuda" else 0, "notes": notes, "accumulate": bool(options.only)}

    def _cell(self, key: str, options: argparse.Namespace) -> Cell:
        workload = WORKLOADS[key]
        ms: dict[str, list[float]] = {"plain": [], self.other: []}
        ratios: list[list[float]] = []
        for _ in range(options.jobs):
            with Stage(options.sluice.absolute(), ROOT / "build" / self.name / key) as stage:
                workers = self.workers(stage, key, options.memory or POOL[workload.backend])
                of_job, last = in_turn(workers, options.pairs, options.window, self.free_bytes if workload.backend == "cuda" else None)
            more, targets = self.more(workload, last)
            ratios.append([other / plain for plain, other in zip(of_job["plain"], of_job[self.other])])
            for name, samples in of_job.items():
                ms[name] += samples
        metrics = {"step_ratio": single(typical(ratios), "plain torch, same run", interval(ratios)),
                   **{f"{name}_step_ms": distribution(samples) for name, samples in ms.items()}}
        return Cell(workload.params | ({"jobs": options.jobs} if options.jobs > 1 else {}), metrics | more, targets)

    def workers(self, stage: Stage, key: str, memory: str) -> dict[str, Worker]:
        """Starts the two processes that are measured; the pool has so much memory."""
        return {name: Worker(stage, name, self._command(key, name == self.other, stage.sluice, memory))
                for name in ("plain", self.other)}

    def _command(self, key: str, shared: bool, sluice: Path, memory: str) -> list:
        worker = [sys.executable, self.program, "--worker", key]
        if not shared:
            return worker
        backend = WORKLOADS[key].backend
        return [sluice, "run", "--require-pool", "--backend", backend, "--memory", memory, "--", *worker, "--shared"]
