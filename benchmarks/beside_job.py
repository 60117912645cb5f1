"""The training job beside inference: it writes the instant of each step's end (monotonic nanoseconds), a line each.

With --parts a line begins with the instants of the step's parts: of its micro-batches and of the model's repeated blocks,
forward and backward. On a GPU the instants are the device's own, by events.

With --rest the job rests between two steps for as long as that file exists, with nothing left on the device: while it does
there is a file of the same name with `.reached`. The line `- INSTANT` says when it goes on.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overhead_models
import torch

#: Classes that the workloads' models are made of.
BLOCKS = ("GPT2Block", "EncoderBlock", "Bottleneck", "Block")
#: What takes long to import of the packages that workloads need.
IMPORTS = {"transformers": "transformers.models.gpt2.modeling_gpt2"}
#: A step's end is asked for so many steps later: the queue never runs empty for it.
LATER = 2


class Instants:
    """Of the step that is made, and those of steps that have been made but not written."""

    def __init__(self, file: Any, cuda: bool) -> None:
        self._file, self._cuda = file, cuda
        self._step: list[Any] = []
        self._made: collections.deque[list[Any]] = collections.deque()
        if cuda:
            torch.cuda.synchronize()
            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record()
            self._base.synchronize()
            self._base_ns = time.monotonic_ns()

    def mark(self, *_: Any) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._step.append(event)
        else:
            self._step.append(time.monotonic_ns())

    def end_step(self) -> None:
        self.mark()
        self._made.append(self._step)
        self._step = []
        self._write(LATER if self._cuda else 0)

    def rest(self, while_there: Path) -> None:
        """All steps have been written then, and the device is done with them."""
        self._write(0)
        reached = while_there.with_suffix(".reached")
        reached.touch()
        while while_there.exists():
            time.sleep(0.002)
        self._file.write(f"- {time.monotonic_ns()}\n")
        self._file.flush()
        reached.unlink()

    def _write(self, left: int) -> None:
        while len(self._made) > left:
            step = self._made.popleft()
            if self._cuda:
                step[-1].synchronize()
                step = [self._base_ns + int(1e6 * self._base.elapsed_time(each)) for each in step]
            self._file.write(" ".join(map(str, step)) + "\n")
            self._file.flush()

    def of_parts(self, job: overhead_models.Job) -> None:
        """Marks where micro-batches and blocks begin, and where the backward of a block ends."""
        loss = job.loss

        def marked(*batch: Any) -> torch.Tensor:
            if self._step:  # not the step's first
                self.mark()
            return loss(*batch)

        def enters(_module: torch.nn.Module, given: tuple) -> None:
            self.mark()
            if given and isinstance(given[0], torch.Tensor) and given[0].requires_grad:
                given[0].register_hook(self.mark)

        job.loss = marked
        for module in job.model.modules():
            if type(module).__name__ in BLOCKS:
                module.register_forward_pre_hook(enters)


def step_of(job: overhead_models.Job, workload: overhead_models.Workload, shared: bool) -> Callable[[], Any]:
    if not shared:
        return overhead_models.plain_step(job, workload.micro_batches)
    import sluice

    owner = sluice.Step(job.model, job.optimizer)
    if not owner.shared:
        raise SystemExit("this process does not share the pool")
    return lambda: owner(job.loss, *job.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=overhead_models.WORKLOADS, required=True)
    parser.add_argument("--shared", action="store_true", help="under `sluice run`")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--after", type=Path, help="touch no device before this file appears, but import what is needed")
    parser.add_argument("--until", type=Path, required=True, help="end when this file appears")
    parser.add_argument("--rest", type=Path, help="rest while this file exists")
    parser.add_argument("--steps", type=Path, required=True, help="the file that is written")
    args = parser.parse_args()
    workload = overhead_models.WORKLOADS[args.workload]
    if args.after:
        for package in workload.packages:
            importlib.import_module(IMPORTS.get(package, package))
        while not args.after.exists():
            if args.until.exists():
                return
            time.sleep(0.05)
    torch.manual_seed(0)
    job = workload.make(workload.batch)
    with args.steps.open("w", encoding="utf-8") as file:
        instants = Instants(file, workload.backend == "cuda")
        if args.parts:
            instants.of_parts(job)
        step = step_of(job, workload, args.shared)
        while not args.until.exists():
            step()
            instants.end_step()
            if args.rest and args.rest.exists():
                instants.rest(args.rest)


if __name__ == "__main__":
    main()
