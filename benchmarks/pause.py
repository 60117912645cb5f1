#!/usr/bin/env python3
"""How long a pause of training takes at random instants, and what it costs training that pauses are short.

    ./benchmarks/run.sh pause [--only resnet50] [--pauses 2000] [--ways deferred-150 direct-150 none]

Two processes make the same steps of the same model in turn (pairs.py): one in plain PyTorch, one under `sluice run`. The
second is told how far launches may run ahead of the device before each window: `none` lets them, as without an inference
server; `direct-B` makes the launching thread wait for room, `deferred-B` leaves its calls to the submitter, each with at
most B µs of predicted work outstanding. For each of these ways windows without pauses show the cost, further windows with
pauses every 5 to 15 ms what a pause takes. Excess is what a pause takes beyond the end of the unit (kernel, copy, graph)
that was executing; `lost_us` what a pause costs training's time, that ends as soon as the device is idle: until it is busy
again. The job that is one CUDA graph does not use the step API. With --read-losses both processes read the loss back in
every step, as loops that log it do. Needs a GPU.
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overhead_models
from overhead_models import Workload, gpt2_compiled_on_cuda, gpt2_graph_on_cuda, plain_step
from pairs import POOL, ROOT, WARM_UP_STEPS, Worker, interval
from records import Cell, distribution, single, write

from demonstration.processes import Failed, Stage, has_cuda

WORKLOADS = {each.name: each for each in (
    *(common for common in overhead_models.WORKLOADS.values() if common.backend == "cuda" and common.micro_batches == 1
      and not common.of_ranks),
    Workload("gpt2-medium-compiled", "cuda", 8, 1, gpt2_compiled_on_cuda, ("transformers",), "bf16"),
    Workload("gpt2-medium-graph", "cuda", 8, 1, gpt2_graph_on_cuda, ("transformers",), "bf16"),
)}
#: One graph is one unit, which a pause waits for: what it takes is told, without a target.
ONE_UNIT = {"gpt2-medium-graph"}
WAYS = ("none", "direct-150", "deferred-50", "deferred-100", "deferred-150", "deferred-200", "deferred-400")
GAP_US = (5_000, 15_000)
MOST_PAUSES = 10_000  # of one window
TARGETS = {"pause_us.p50": "<= 300", "excess_us.p99": "<= 300", "step_ratio.value": "<= 1.01"}
UNBOUND_TARGETS = {"step_ratio.value": "<= 1.002"}
DEFAULT_WAY = "deferred-150"


def bound_of(way: str) -> tuple[bool, int]:
    """Whether calls are deferred, and the bound in microseconds (0: none). Raises argparse.ArgumentTypeError."""
    if way == "none":
        return False, 0
    parsed = re.fullmatch(r"(direct|deferred)-([1-9][0-9]*)", way)
    if not parsed:
        raise argparse.ArgumentTypeError(f"'{way}' must be none, direct-MICROSECONDS or deferred-MICROSECONDS")
    return parsed[1] == "deferred", int(parsed[2])


def way(text: str) -> str:
    bound_of(text)
    return text


# --- the processes that are measured ----------------------------------------------------------------------------------


class Pauser:
    """pauser.cpp in this process. Raises SystemExit if the process has no gate."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        if not self._library.sluice_bench_has_gate():
            raise SystemExit("this process does not share the pool")
        self._library.sluice_bench_stop_pausing.restype = ctypes.c_size_t
        self._library.sluice_bench_bound.argtypes = [ctypes.c_int, ctypes.c_int64]
        self._library.sluice_bench_start_pausing.argtypes = [ctypes.c_uint, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]

    def share(self, file: Path, rank: int, ranks: int) -> None:
        """From now on the ranks of a job pause together."""
        if error := self._library.sluice_bench_share(str(file).encode(), rank, ranks):
            raise OSError(error, os.strerror(error), str(file))

    def bound(self, deferred: bool, microseconds: int, owner: Any) -> None:
        """Bounds run-ahead. The step, if there is one, looks for a server, which this benchmark stands for."""
        self._library.sluice_bench_bound(deferred, microseconds)
        if owner is not None:
            owner._engine.runtime.serving = lambda: int(microseconds > 0)

    def start(self, seed: int, one_rank_each: bool = False) -> None:
        self._library.sluice_bench_start_pausing(seed, *GAP_US, one_rank_each)

    def stop(self, raises: bool = True) -> dict:
        """What each pause since `start` took, and its excess, in microseconds. Of ranks the first one is told.

        Raises SystemExit if one of them did not come to rest; or else says how many were `stuck`."""
        took, excess = ((ctypes.c_int64 * MOST_PAUSES)() for _ in range(2))
        stuck = ctypes.c_uint64()
        count = self._library.sluice_bench_stop_pausing(took, excess, ctypes.c_size_t(MOST_PAUSES), ctypes.byref(stuck))
        if stuck.value and raises:
            raise SystemExit(f"{stuck.value} pauses have not come to rest within two seconds")
        return {"took_us": [ns / 1e3 for ns in took[:count]], "excess_us": [ns / 1e3 for ns in excess[:count]],
                "stuck": stuck.value}


def work(workload: Workload, library: Path | None, read_losses: bool) -> None:
    """Reads what to do from standard input, a JSON object a line, and answers each with what it took."""
    import torch

    torch.manual_seed(0)
    job = workload.make(workload.batch)
    if library:
        import sluice

        owner = None if job.step else sluice.Step(job.model, job.optimizer)
        pauser = Pauser(library)
        if owner is not None and not owner.shared:
            raise SystemExit("this process does not share the pool")

    if job.step:
        step = job.step
    elif library:
        def step() -> torch.Tensor:
            return owner(job.loss, *job.batch)
    else:
        step = plain_step(job, workload.micro_batches)
    if read_losses:
        launch = step

        def step() -> None:
            launch().item()

    for line in sys.stdin:
        wanted = json.loads(line)
        answer = {}
        if library:
            pauser.bound(*wanted["bound"], owner)
        torch.cuda.synchronize()
        if wanted.get("seed"):
            pauser.start(wanted["seed"])
        started = time.perf_counter()
        for _ in range(wanted["steps"]):
            step()
        torch.cuda.synchronize()
        answer["seconds"] = time.perf_counter() - started
        if wanted.get("seed"):
            answer |= pauser.stop()
        print(json.dumps(answer), flush=True)


# --- the process that measures ----------------------------------------------------------------------------------------


class Job(Worker):
    """A worker of this benchmark, which is told more than a number of steps."""

    def make(self, steps: int, chosen: str, seed: int = 0) -> dict:
        return self.run(json.dumps({"steps": steps, "bound": bound_of(chosen), "seed": seed}))


def cell(workload: Workload, chosen: str, jobs: dict[str, Job], options: argparse.Namespace) -> Cell:
    """One way: pairs of windows without pauses, then windows with them."""
    for job in jobs.values():
        job.make(WARM_UP_STEPS, chosen)
    pace = jobs["plain"].make(4, chosen)["seconds"] / 4
    steps = max(1, round(options.window / pace))
    ms: dict[str, list[float]] = {name: [] for name in jobs}
    for pair in range(options.pairs):
        for name in jobs if pair % 2 == 0 else reversed(jobs):
            ms[name].append(jobs[name].make(steps, chosen)["seconds"] / steps * 1e3)
    wanted = options.pauses if chosen == DEFAULT_WAY else min(options.pauses, options.pauses_elsewhere)
    took: list[float] = []
    excess: list[float] = []
    lost: list[float] = []
    undisturbed = statistics.median(ms["sluice"]) / 1e3 * steps
    while len(took) < wanted:
        answer = jobs["sluice"].make(steps, chosen, seed=len(took) + 1)
        if not answer["took_us"]:
            raise Failed(f"{workload.name}, {chosen}: no pause in {answer['seconds']:.1f} s")
        took += answer["took_us"]
        excess += answer["excess_us"]
        lost.append((answer["seconds"] - undisturbed) * 1e6 / len(answer["took_us"]))
    ratios = [other / plain for plain, other in zip(ms["plain"], ms["sluice"])]
    deferred, bound = bound_of(chosen)
    metrics = {"pause_us": distribution(took), "excess_us": distribution(excess), "lost_us": single(statistics.median(lost)),
               "step_ratio": single(statistics.median(ratios), "plain torch, same run", interval([ratios])),
               **{f"{name}_step_ms": distribution(samples) for name, samples in ms.items()}}
    params = {**workload.params, "submission": "deferred" if deferred else "direct", "run_ahead_us": bound,
              **({"losses": "read"} if options.read_losses else {})}
    targets = UNBOUND_TARGETS if bound == 0 else TARGETS if chosen == DEFAULT_WAY else {}
    if workload.name in ONE_UNIT and bound > 0:
        targets = {}
    return Cell(params, metrics, targets)


def measure(workload: Workload, options: argparse.Namespace) -> Iterator[Cell]:
    with Stage(options.sluice.absolute(), ROOT / "build" / "pause" / workload.name) as stage:
        plain = [sys.executable, Path(__file__).resolve(), "--worker", workload.name,
                 *(["--read-losses"] if options.read_losses else [])]
        shared = [stage.sluice, "run", "--require-pool", "--backend", "cuda", "--memory", POOL["cuda"], "--",
                  *plain, "--library", options.pauser.absolute()]
        jobs = {"plain": Job(stage, "plain", plain), "sluice": Job(stage, "sluice", shared)}
        for name, job in jobs.items():
            begun = time.monotonic()
            job.make(1, "none")
            print(f"    {name}: the first step took {time.monotonic() - begun:.0f} s", flush=True)
        for chosen in options.ways:
            yield cell(workload, chosen, jobs, options)


def main() -> int:
    built = ROOT / "build" / "release"
    parser = argparse.ArgumentParser(description="Length and cost of pauses of training.")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="measure this alone; may be repeated")
    parser.add_argument("--ways", type=way, nargs="+", default=WAYS, metavar="WAY", help="default: %(default)s")
    parser.add_argument("--pauses", type=int, default=2000, help=f"of {DEFAULT_WAY} (default %(default)s)")
    parser.add_argument("--pauses-elsewhere", type=int, default=300, help="of other ways (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="of windows (default %(default)s)")
    parser.add_argument("--window", type=float, default=1.0, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--read-losses", action="store_true", help="in every step")
    parser.add_argument("--sluice", type=Path, default=built / "bin" / "sluice")
    parser.add_argument("--pauser", type=Path, default=built / "lib" / "libsluice_bench_pauser.so")
    parser.add_argument("--worker", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(WORKLOADS[options.worker], options.library, options.read_losses)
        return 0
    if options.pairs < 2 or options.pauses < 1 or options.pauses_elsewhere < 1:
        parser.error("--pairs must be at least 2, --pauses and --pauses-elsewhere at least 1")
    for path in (options.sluice, options.pauser):
        if not path.exists():
            parser.error(f"there is no {path}; run ./scripts/build.sh")
    if not has_cuda():
        raise SystemExit("pause: this machine has no GPU; on the host backend nothing is gated")
    for name, workload in WORKLOADS.items():
        if not options.only or name in options.only:
            print(f"==> {name}", flush=True)
            try:
                for each in measure(workload, options):
                    write("pause", [each], gpus=1, accumulate=True)
            except Failed as failure:
                raise SystemExit(f"pause: {failure}") from failure
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
