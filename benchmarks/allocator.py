#!/usr/bin/env python3
"""What the pool's memory costs a training step, against torch's own, in time and in bytes.

    ./benchmarks/run.sh allocator [--backend auto|host|cuda] [--pairs 16] [--window 2]

Two processes run the same loop in turn (pairs.py): gradients that stay (`set_to_none=False`), forward and backward in
one micro-batch, optimizer, all in one thread. One is plain PyTorch. The other runs under `sluice run`, with forward and
backward in the step arena and everything else in persistent memory, but without what `sluice.Step` adds: no
accumulators, nothing saved for a retry. `overhead` measures those.

`peak_memory_ratio` (CUDA) compares from the start of both: the chunks that the pool has granted to the job, arena,
persistent and spare ones, with the most that plain torch has reserved. A job gives chunks back only to a server, and
there is none, so that what it holds at the end is its peak. Memory that libraries take without torch counts in the pool
alone. The host has no such figure: torch reserves nothing there.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from overhead_models import WORKLOADS, Workload
from pairs import Comparison, answer
from records import single, write

TARGETS = {"step_ratio.value": "<= 1.005"}
MEMORY_TARGETS = {"peak_memory_ratio.value": "<= 1.03"}
# What lasts is made outside the arena, as by sluice.Step: gradients first, then libraries' workspaces by a few samples whose
# memory is given back; the optimizer's state by the first step.
SAMPLES_BEFORE = 2


# --- the process that is measured -------------------------------------------------------------------------------------


class PoolMemory:
    """The step arena, as sluice.Step enters it."""

    def __init__(self, cuda: bool) -> None:
        from sluice import _arena, _runtime

        self.runtime = _runtime.attach(cuda)
        if self.runtime is None:
            raise SystemExit("this process does not share the pool")
        self._arena = _arena.make_arena(self.runtime, cuda)

    @contextlib.contextmanager
    def micro_batch(self, samples: int) -> Iterator[None]:
        self.runtime.begin(samples, samples)
        self._arena.enter(samples)
        try:
            yield
        finally:
            self._arena.leave()
        if not self.runtime.commit_begin(0):
            raise SystemExit("the arena was lost though nothing asked for memory")
        self.runtime.commit_end(samples, self._arena.outlived())
        self.runtime.commit_settle(0)


def held_bytes() -> dict[str, int]:
    """Bytes of the chunks that the ledger says are this job's, all of them, and those of the arena in use, unused ones and
    persistent ones; and what torch says that it has reserved in them at most."""
    import torch

    status = subprocess.run([os.environ["SLUICE_BROKER"], "status", "--json"], capture_output=True, check=True)
    own = next(client for client in json.loads(status.stdout)["clients"] if client["pid"] == os.getpid())
    return {"peak_bytes": own["bytes"], "arena_bytes": own["arena_bytes"] - own["spare_bytes"],
            "spare_bytes": own["spare_bytes"], "persistent_bytes": own["persistent_bytes"],
            "torch_peak_bytes": torch.cuda.max_memory_reserved()}


def work(workload: Workload, pooled: bool) -> None:
    """The process that is measured."""
    import torch

    cuda = workload.backend == "cuda"
    torch.manual_seed(0)
    # Before anything else takes memory, so that on the host, too, all of it is the pool's.
    memory = PoolMemory(cuda) if pooled else None
    job = workload.make(workload.batch)

    def forward_backward(batch: tuple, inside: contextlib.AbstractContextManager) -> None:
        with inside, torch.autograd.set_multithreading_enabled(False):
            job.loss(*batch).backward()

    def step() -> None:
        job.optimizer.zero_grad(set_to_none=False)
        forward_backward(job.batch, memory.micro_batch(workload.batch) if pooled else contextlib.nullcontext())
        job.optimizer.step()

    for param in job.model.parameters():
        param.grad = torch.zeros_like(param)
    forward_backward(tuple(each[:SAMPLES_BEFORE] for each in job.batch), contextlib.nullcontext())
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def settle() -> None:
        if cuda:
            torch.cuda.synchronize()

    def peak() -> dict:
        if not cuda:
            return {}
        return held_bytes() if pooled else {"peak_bytes": torch.cuda.max_memory_reserved()}

    answer(step, settle, peak)


# --- the process that measures ----------------------------------------------------------------------------------------


def peaks(workload: Workload, last: dict[str, dict]) -> tuple[dict, dict]:
    """Metrics of memory, and the targets."""
    if workload.backend != "cuda":
        return {}, TARGETS
    plain, pool = (last[name]["peak_bytes"] for name in ("plain", "pool"))
    return {"peak_memory_ratio": single(pool / plain, "plain torch's peak of reserved bytes, same run"),
            "plain_peak_bytes": single(plain), **{f"pool_{name}": single(value) for name, value in last["pool"].items()
                                                  if name.endswith("_bytes")}}, TARGETS | MEMORY_TARGETS


def main() -> int:
    comparison = Comparison(
        "allocator", "Cost of the pool's memory on a training step.", Path(__file__).resolve(), "pool",
        ("host-convnet-1", "cuda-resnet50-1", "cuda-gpt2-medium-1"), pairs=16, more=peaks)
    options = comparison.options()
    if options.worker:
        work(WORKLOADS[options.worker], options.shared)
        return 0
    write(comparison.name, **comparison.measured(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
