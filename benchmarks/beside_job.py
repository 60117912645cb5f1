"""The training job beside inference: it writes the instant of each step's end (monotonic nanoseconds), a line each."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import overhead_models
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=overhead_models.WORKLOADS, required=True)
    parser.add_argument("--shared", action="store_true", help="under `sluice run`")
    parser.add_argument("--until", type=Path, required=True, help="end when this file appears")
    parser.add_argument("--steps", type=Path, required=True, help="the file that is written")
    args = parser.parse_args()
    torch.manual_seed(0)
    workload = overhead_models.WORKLOADS[args.workload]
    job = workload.make(workload.batch)
    if args.shared:
        import sluice

        owner = sluice.Step(job.model, job.optimizer)
        if not owner.shared:
            raise SystemExit("this process does not share the pool")

        def step() -> None:
            owner(job.loss, *job.batch)
    else:
        step = overhead_models.plain_step(job, workload.micro_batches)

    # A step has ended when the device says so, which is asked for two steps later: the queue never runs empty for it.
    ends = [torch.cuda.Event(), torch.cuda.Event()] if workload.backend == "cuda" else []
    with args.steps.open("w", encoding="utf-8") as file:
        for number in range(1 << 62):
            if args.until.exists():
                break
            if ends and number >= len(ends):
                ends[number % len(ends)].synchronize()
            if number >= len(ends):
                file.write(f"{time.monotonic_ns()}\n")
                file.flush()
            step()
            if ends:
                ends[number % len(ends)].record()


if __name__ == "__main__":
    main()
