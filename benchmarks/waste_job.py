"""A training job that tells what it did in vain, and how soon after each handover it went on.

It trains one of the workloads of overhead_models.py on one batch until the file --until appears, and writes one JSON
object to --out: {"seconds": since its first step, "steps": so many, "retries": [[retry_us, discarded_ms], …]}, an entry
for each micro-batch that was run again. Its retry begins when the loss function is called; its first kernel follows.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import overhead_models
import torch

import sluice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=overhead_models.WORKLOADS, required=True)
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    workload = overhead_models.WORKLOADS[args.workload]
    job = workload.make(workload.batch)
    step = sluice.Step(job.model, job.optimizer, micro_batch=math.ceil(workload.batch / workload.micro_batches),
                       adapt=False)
    if not step.shared:
        raise SystemExit("this process does not share the pool")
    runtime = step._engine.runtime
    reopened, discarded = runtime.reopened_ns(), runtime.discarded_ns()
    retries: list[tuple[float, float]] = []

    def loss_of(*slices: torch.Tensor) -> torch.Tensor:
        nonlocal reopened, discarded
        if runtime.reopened_ns() != reopened:
            now, before = time.monotonic_ns(), discarded
            reopened, discarded = runtime.reopened_ns(), runtime.discarded_ns()
            retries.append(((now - reopened) / 1e3, (discarded - before) / 1e6))
        return job.loss(*slices)

    steps, started = 0, time.monotonic()
    while not args.until.exists():
        step(loss_of, *job.batch)
        steps += 1
    args.out.write_text(json.dumps({"seconds": time.monotonic() - started, "steps": steps, "retries": retries}))


if __name__ == "__main__":
    main()
