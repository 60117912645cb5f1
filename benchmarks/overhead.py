#!/usr/bin/env python3
"""What a training step costs under `sluice run`, with the step API and all parts on, against plain PyTorch.

    ./benchmarks/run.sh overhead [--backend auto|host|cuda] [--pairs 20] [--window 2]

Two processes make the same steps of the same model in turn (pairs.py): one in plain PyTorch, one under `sluice run`.
"""

import argparse
import importlib.util
import math
import statistics
import sys
from pathlib import Path

from overhead_models import WORKLOADS, Workload  # also finds the examples
from pairs import Worker, answer, in_turn, interval
from records import Cell, distribution, single, write

from demonstration.processes import Failed, Stage, has_cuda

ROOT = Path(__file__).resolve().parent.parent
TARGET = {"step_ratio.value": "<= 1.02"}
POOL = {"host": "3GiB", "cuda": "64GiB"}


# --- the process that is measured -------------------------------------------------------------------------------------


def plain_step(job, micro_batches: int):
    """The usual loop: gradients accumulate over slices whose losses are weighted by their share."""
    total = len(job.batch[0])
    bounds = [total * i // micro_batches for i in range(micro_batches + 1)]

    def step() -> None:
        job.optimizer.zero_grad(set_to_none=True)
        for start, stop in zip(bounds, bounds[1:]):
            loss = job.loss(*(each[start:stop] for each in job.batch))
            (loss if micro_batches == 1 else loss * ((stop - start) / total)).backward()
        job.optimizer.step()

    return step


def work(workload: Workload, shared: bool) -> None:
    """The process that is measured."""
    import torch

    torch.manual_seed(0)
    job = workload.make(workload.batch)
    if shared:
        import sluice

        owner = sluice.Step(job.model, job.optimizer, micro_batch=math.ceil(workload.batch / workload.micro_batches))
        if not owner.shared:
            raise SystemExit("this process does not share the pool")

        def step() -> None:
            owner(job.loss, *job.batch)
    else:
        step = plain_step(job, workload.micro_batches)

    def settle() -> None:
        if workload.backend == "cuda":
            torch.cuda.synchronize()

    answer(step, settle, lambda: {"discards": owner.stats()["discards"]} if shared else {})


# --- the process that measures ----------------------------------------------------------------------------------------


def command(key: str, shared: bool, sluice: Path) -> list:
    worker = [sys.executable, Path(__file__).resolve(), "--worker", key]
    if not shared:
        return worker
    backend = WORKLOADS[key].backend
    return [sluice, "run", "--require-pool", "--backend", backend, "--memory", POOL[backend], "--", *worker, "--shared"]


def measure(workload: Workload, key: str, sluice: Path, pairs: int, window: float) -> Cell:
    with Stage(sluice, ROOT / "build" / "overhead" / key) as stage:
        workers = {name: Worker(stage, name, command(key, name == "sluice", stage.sluice)) for name in ("plain", "sluice")}
        ms, last = in_turn(workers, pairs, window)
    discards = last["sluice"]["discards"]
    if discards:
        raise Failed(f"{key}: {discards} micro-batches were discarded though nothing asked for memory")
    ratios = [shared / plain for plain, shared in zip(ms["plain"], ms["sluice"])]
    return Cell(
        workload.params,
        {"step_ratio": single(statistics.median(ratios), "plain torch, same run", interval(ratios)),
         "plain_step_ms": distribution(ms["plain"]), "sluice_step_ms": distribution(ms["sluice"])},
        TARGET)


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of the step API and the gate on a training step.")
    parser.add_argument("--backend", choices=["auto", "host", "cuda"], default="auto")
    parser.add_argument("--only", choices=list(WORKLOADS), action="append", help="measure this alone; may be repeated")
    parser.add_argument("--pairs", type=int, default=20, help="of windows (default %(default)s)")
    parser.add_argument("--window", type=float, default=2.0, metavar="SECONDS", help="at least (default %(default)s)")
    parser.add_argument("--sluice", type=Path, default=ROOT / "build" / "release" / "bin" / "sluice")
    parser.add_argument("--worker", choices=list(WORKLOADS), help=argparse.SUPPRESS)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(WORKLOADS[options.worker], options.shared)
        return 0
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    if not options.sluice.exists():
        parser.error(f"there is no {options.sluice}; run ./scripts/build.sh")

    backend = options.backend if options.backend != "auto" else "cuda" if has_cuda() else "host"
    cells, notes = [], []
    for key, workload in WORKLOADS.items():
        if workload.backend != backend or (options.only and key not in options.only):
            continue
        missing = [name for name in workload.packages if importlib.util.find_spec(name) is None]
        if missing:
            notes.append(f"{key} is left out: {', '.join(missing)} is not installed")
            continue
        print(f"==> {key}", flush=True)
        try:
            cells.append(measure(workload, key, options.sluice.absolute(), options.pairs, options.window))
        except Failed as failure:
            print(f"overhead: {failure}", file=sys.stderr)
            return 1
    if not cells:
        print("\n".join(["overhead: nothing was measured", *notes]), file=sys.stderr)
        return 1
    write("overhead", cells, gpus=1 if backend == "cuda" else 0, notes=notes, accumulate=bool(options.only))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
