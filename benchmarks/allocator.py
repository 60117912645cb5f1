#!/usr/bin/env python3
"""What the pool's memory costs a training step, against torch's own, in time and in bytes.

    ./benchmarks/run.sh allocator [--backend auto|host|cuda] [--pairs 16] [--window 2]

Two processes run the same loop in turn (pairs.py): gradients that stay (`set_to_none=False`), forward and backward in
one micro-batch, optimizer, all in one thread. One is plain PyTorch. The other runs under `sluice run`, with forward and
backward in the step arena and everything else in persistent memory, but without what `sluice.Step` adds: no
accumulators, nothing saved for a retry. `overhead` measures those.

`peak_memory_ratio` (CUDA) compares all that the device has given to either process since its context was there: torch's
memory, libraries', and the driver's for kernels that are loaded. Neither takes less later: plain torch keeps what it has
reserved, and a job gives chunks of the pool to a server, of which there is none, or for as many others. So what is gone at
the end is the peak. In the pool that is the chunks that were granted, arena, persistent and spare ones, and what the device
has less beside the pool. One process takes its memory after the other. The host has no such figure: torch reserves nothing
there.
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
        from sluice import _arena, _engine, _runtime

        self.runtime = _runtime.attach(cuda)
        if self.runtime is None:
            raise SystemExit("this process does not share the pool")
        self._arena = _arena.make_arena(self.runtime, cuda)
        self._makes_room = _engine.OPTIMIZER_WARM_UP_STEPS

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
        self.runtime.commit_resolve(0)

    def make_room(self) -> None:
        """Before the optimizer runs."""
        if self._makes_room > 0:
            self._makes_room -= 1
            self._arena.release()


def held_bytes() -> dict[str, int]:
    """Bytes of the chunks that the ledger says are this job's, all of them, and those of the arena in use, unused ones and
    persistent ones."""
    status = subprocess.run([os.environ["SLUICE_BROKER"], "status", "--json"], capture_output=True, check=True)
    own = next(client for client in json.loads(status.stdout)["clients"] if client["pid"] == os.getpid())
    return {"granted_bytes": own["bytes"], "arena_bytes": own["arena_bytes"] - own["spare_bytes"],
            "spare_bytes": own["spare_bytes"], "persistent_bytes": own["persistent_bytes"]}


def train(workload: Workload, memory: PoolMemory | None) -> Iterator[None]:
    """Trains a step whenever it is asked for one. Takes no memory before."""
    import torch

    torch.manual_seed(0)
    job = workload.make(workload.batch)

    def forward_backward(batch: tuple, inside: contextlib.AbstractContextManager) -> None:
        with inside, torch.autograd.set_multithreading_enabled(False):
            job.loss(*batch).backward()

    for param in job.model.parameters():
        param.grad = torch.zeros_like(param)
    forward_backward(tuple(each[:SAMPLES_BEFORE] for each in job.batch), contextlib.nullcontext())
    if workload.backend == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    while True:
        job.optimizer.zero_grad(set_to_none=False)
        forward_backward(job.batch, memory.micro_batch(workload.batch) if memory else contextlib.nullcontext())
        if memory:
            memory.make_room()
        job.optimizer.step()
        yield


def work(workload: Workload, pooled: bool) -> None:
    """The process that is measured."""
    import torch

    cuda = workload.backend == "cuda"
    # Before anything else takes memory, so that on the host, too, all of it is the pool's.
    memory = PoolMemory(cuda) if pooled else None
    steps = train(workload, memory)

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()  # makes the context, if there is none

    def bytes_so_far() -> dict:
        if not cuda:
            return {}
        return {"torch_peak_bytes": torch.cuda.max_memory_reserved(), **(held_bytes() if pooled else {})}

    answer(lambda: next(steps), synchronize, bytes_so_far)


# --- the process that measures ----------------------------------------------------------------------------------------


def free_bytes() -> int:
    """What the device has left, in whoever's hands."""
    import torch

    return torch.cuda.mem_get_info()[0]


def peaks(workload: Workload, last: dict[str, dict]) -> tuple[dict, dict]:
    """Metrics of memory, and the targets."""
    if workload.backend != "cuda":
        return {}, TARGETS
    plain, pool = last["plain"]["taken_bytes"], last["pool"]["taken_bytes"] + last["pool"]["granted_bytes"]
    parts = {f"{name}_{key}": single(value) for name in last for key, value in last[name].items() if key.endswith("_bytes")}
    return {"peak_memory_ratio": single(pool / plain, "what the device has given plain torch's process, same run"),
            **parts}, TARGETS | MEMORY_TARGETS


def main() -> int:
    comparison = Comparison(
        "allocator", "Cost of the pool's memory on a training step.", Path(__file__).resolve(), "pool",
        ("host-convnet-1", "cuda-resnet50-1", "cuda-gpt2-medium-1"), pairs=16, more=peaks, free_bytes=free_bytes)
    options = comparison.options()
    if options.worker:
        work(WORKLOADS[options.worker], options.shared)
        return 0
    write(comparison.name, **comparison.measured(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
