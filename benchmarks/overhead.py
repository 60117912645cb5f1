#!/usr/bin/env python3
"""What a training step costs under `sluice run`, with the step API and all parts on, against plain PyTorch.

    ./benchmarks/run.sh overhead [--backend auto|host|cuda] [--pairs 20] [--window 2]

Two processes make the same steps of the same model in turn (pairs.py): one in plain PyTorch, one under `sluice run`.
"""

import math
from pathlib import Path

from overhead_models import WORKLOADS, Workload, plain_step  # also finds the examples
from pairs import Comparison, answer
from records import write

from demonstration.processes import Failed

TARGET = {"step_ratio.value": "<= 1.02"}


# --- the process that is measured -------------------------------------------------------------------------------------


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

    def synchronize() -> None:
        if workload.backend == "cuda":
            torch.cuda.synchronize()

    answer(step, synchronize, lambda: {"discards": owner.stats()["discards"]} if shared else {})


# --- the process that measures ----------------------------------------------------------------------------------------


def undisturbed(workload: Workload, last: dict[str, dict]) -> tuple[dict, dict]:
    """No metrics of its own, and the target. Raises Failed if the run was disturbed."""
    if discards := last["sluice"]["discards"]:
        raise Failed(f"{workload.name}: {discards} micro-batches were discarded though nothing asked for memory")
    return {}, TARGET


def main() -> int:
    comparison = Comparison(
        "overhead", "Cost of the step API and the gate on a training step.", Path(__file__).resolve(), "sluice",
        tuple(key for key, workload in WORKLOADS.items() if not workload.of_ranks), pairs=20, more=undisturbed)
    options = comparison.options()
    if options.worker:
        work(WORKLOADS[options.worker], options.shared)
        return 0
    write(comparison.name, **comparison.measured(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
