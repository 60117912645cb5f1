#!/usr/bin/env python3
"""How long it takes until all GPUs of a data-parallel job are at rest, at random instants, and what else one could do.

    ./benchmarks/run.sh nccl_pause [--only resnet50] [--pauses 1000] [--parts pauses handover rebuild]

A job with a rank on each GPU trains under `sluice run`; its ranks agree on each collective. *Pauses*: at one instant the gates
of all ranks close, or of one that is chosen by chance; a pause is what the last of them takes until its device is idle, its
excess what lies beyond the unit that was executing there. The job keeps its communicator: the benchmark fails if it is another
one afterwards. *Handover*: a server on each GPU takes memory from a running micro-batch, all at one instant; what counts is the
last one's. *Rebuild*: the other way out of collectives, in plain PyTorch: all ranks abort their communicator while all-reduces
are under way, wait until the device is idle, make another one and an all-reduce with it. Needs two GPUs.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from brokers import clear_up_on_sigterm, job_in_pool
from overhead_models import WORKLOADS as ALL
from overhead_models import Workload
from pairs import POOL, ROOT, WARM_UP_STEPS, Worker
from pause import DEFAULT_WAY, Pauser, bound_of
from ranks import RANKS, all_ranks, make_replica
from records import Cell, distribution, write

from demonstration.processes import Failed, Stage

WORKLOADS = {ALL[key].name: ALL[key] for key in ("cuda-resnet50-1", "cuda-gpt2-medium-1")}
PARTS = ("pauses", "handover", "rebuild")
WINDOW_SECONDS = 3.0
PAUSE_TARGETS = {"pause_us.p50": "<= 500", "excess_us.p99": "<= 1000"}
#: All servers demand at multiples of so many milliseconds. Each pool holds what the model needs and little more.
EVERY_MS = 250
HANDOVER_BYTES = 1 << 30
HANDOVER_POOL = {"resnet50": "14GiB", "gpt2-medium": "46GiB"}
HANDOVER_TARGETS = {"excess_us.p99": "<= 2000"}


# --- the processes that are measured ----------------------------------------------------------------------------------


def work(workload: Workload, options: argparse.Namespace) -> None:
    """One rank: does what the first reads from standard input, a JSON object a line, and answers with what it took."""
    import torch
    from torch import distributed

    with all_ranks() as ranks:
        replica = make_replica(workload, ranks, shared=True)
        backend = distributed.distributed_c10d._get_default_group()._get_backend(replica.device)
        pauser = Pauser(options.library)
        pauser.share(options.file, ranks.rank, ranks.count)
        communicator = None
        for line in ranks.messages():
            wanted = json.loads(line)
            pauser.bound(*bound_of(DEFAULT_WAY), replica.owner)
            distributed.barrier()
            replica.synchronize()
            if wanted["seed"]:
                pauser.start(wanted["seed"], wanted["one_rank_each"])
            started = time.perf_counter()
            for _ in range(wanted["steps"]):
                replica.step()
            replica.synchronize()
            answer = {"seconds": time.perf_counter() - started, **(pauser.stop() if wanted["seed"] else {})}
            communicator = communicator or backend._comm_ptr()
            if backend._comm_ptr() != communicator or backend.get_error() != torch._C._distributed_c10d.ErrorType.SUCCESS:
                raise SystemExit("the communicator is another one now, or has failed")
            ranks.answer(answer)
        distributed.destroy_process_group()


def train(workload: Workload, until: Path) -> None:
    """One rank that trains until the file exists."""
    import torch
    from torch import distributed

    with all_ranks() as ranks:
        # Smaller slices would leave an arena that is never full again.
        replica = make_replica(workload, ranks, shared=True, adapt=False)
        over = torch.zeros((), device=replica.device)
        while not over:
            for _ in range(8):
                replica.step()
            over.fill_(float(until.exists()))
            distributed.broadcast(over, 0)
        distributed.destroy_process_group()


def rebuild(workload: Workload, count: int) -> None:
    """One rank in plain PyTorch, which answers what getting out of collectives by abort took, so often."""
    import torch
    from torch import distributed

    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # or PyTorch's watchdog ends a process that has aborted
    with all_ranks() as ranks:
        replica = make_replica(workload, ranks, shared=False)
        gradients = [torch.randn(25 << 18, device=replica.device) for _ in range(8)]
        store = distributed.distributed_c10d._get_default_store()
        dice = random.Random(1)  # all ranks draw the same instants
        idle_us, rebuilt_us = [], []
        for turn in range(count):
            one = torch.ones((), device=replica.device)
            distributed.all_reduce(one)
            replica.synchronize()
            replica.job.loss(*replica.job.batch).backward()
            for each in gradients:
                distributed.all_reduce(each, async_op=True)
            time.sleep(dice.uniform(0.0, 0.03))
            begun = time.perf_counter()
            distributed.distributed_c10d._abort_process_group()
            replica.synchronize()
            idle_us.append((time.perf_counter() - begun) * 1e6)
            distributed.init_process_group("nccl", store=distributed.PrefixStore(f"turn {turn}", store), rank=ranks.rank,
                                           world_size=ranks.count, device_id=replica.device)
            distributed.all_reduce(one)
            replica.synchronize()
            rebuilt_us.append((time.perf_counter() - begun) * 1e6)
        ranks.answer({"idle_us": idle_us, "rebuilt_us": rebuilt_us})
        distributed.destroy_process_group()


# --- the process that measures ----------------------------------------------------------------------------------------


def worker(workload: Workload, *more: object) -> list:
    return [sys.executable, Path(__file__).resolve(), "--worker", workload.name, *more]


def shared(sluice: Path, memory: str, *options: object) -> list:
    return [sluice, "run", "--require-pool", "--backend", "cuda", "--memory", memory, *options, "--"]


def pauses(workload: Workload, options: argparse.Namespace) -> Iterator[Cell]:
    with Stage(options.sluice.absolute(), ROOT / "build" / "nccl_pause" / workload.name) as stage:
        file = stage.folder / "instants"
        file.unlink(missing_ok=True)
        command = worker(workload, "--part", "pauses", "--library", options.pauser.absolute(), "--file", file)
        job = Worker(stage, "ranks", [*shared(stage.sluice, POOL["cuda"]), *command])

        def make(steps: int, seed: int = 0, one_rank_each: bool = False) -> dict:
            return job.run(json.dumps({"steps": steps, "seed": seed, "one_rank_each": one_rank_each}))

        make(WARM_UP_STEPS)
        steps = max(1, round(WINDOW_SECONDS * 6 / make(6)["seconds"]))
        for one_rank_each in (False, True):
            took: list[float] = []
            excess: list[float] = []
            while len(took) < options.pauses:
                answer = make(steps, len(took) + 1, one_rank_each)
                if not answer["took_us"]:
                    raise Failed(f"{workload.name}: no pause in {answer['seconds']:.1f} s")
                took += answer["took_us"]
                excess += answer["excess_us"]
            yield Cell({**workload.params, "part": "one rank pauses" if one_rank_each else "all ranks pause"},
                       {"pause_us": distribution(took), "excess_us": distribution(excess)}, PAUSE_TARGETS)


def handover(workload: Workload, options: argparse.Namespace) -> Iterator[Cell]:
    binaries = options.sluice.absolute().parent
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder, contextlib.ExitStack() as stack:
        environment = {**os.environ, "SLUICE_BROKER_IDLE_EXIT_MS": "2000"}
        until = Path(folder) / "enough"
        training = stack.enter_context(job_in_pool(
            options.sluice, "cuda", folder, ["--require-pool", "--memory", HANDOVER_POOL[workload.name]],
            worker(workload, "--part", "handover", "--file", until), environment))
        servers = [subprocess.Popen(
            [binaries / "sluice-bench-handover", "--runtime-dir", folder, "--device", str(device), "--bytes",
             str(HANDOVER_BYTES), "--count", str(options.handovers), "--seconds", str(options.handover_seconds), "--delay-ms", "0",
             "--at-multiples-ms", str(EVERY_MS), "--fill", "--live"],
            env={**environment, "SLUICE_BROKER": str(binaries / "sluice")}, stdout=subprocess.PIPE, text=True)
            for device in range(int(os.environ[RANKS]))]
        by_instant: dict[int, list[dict]] = {}
        for said in [server.communicate()[0] for server in servers]:
            for sample in map(json.loads, said.splitlines()):
                by_instant.setdefault(sample["demanded_ns"] // (EVERY_MS * 1_000_000), []).append(sample)
        until.touch()
        ended = training.wait(120)
    if any(server.returncode for server in servers):
        raise Failed(f"{workload.name}: a server failed")
    if ended != 0:
        raise Failed(f"{workload.name}: training ended with {ended}")
    together = [each for each in by_instant.values() if len(each) == len(servers) and all(one["counts"] for one in each)]
    if not together:
        raise Failed(f"{workload.name}: no handover of all ranks at one instant, of {len(by_instant)}")
    yield Cell({**workload.params, "part": "handover of all ranks", "size_mib": HANDOVER_BYTES >> 20},
               {"latency_us": distribution(max(one["latency_us"] for one in each) for each in together),
                "excess_us": distribution(max(one["latency_us"] - one["unit_us"] for one in each) for each in together)},
               HANDOVER_TARGETS)


def rebuilds(workload: Workload, options: argparse.Namespace) -> Iterator[Cell]:
    with Stage(options.sluice.absolute(), ROOT / "build" / "nccl_pause" / workload.name) as stage:
        job = Worker(stage, "plain", worker(workload, "--part", "rebuild", "--count", options.rebuilds))
        answer = job.run("once")
        yield Cell({**workload.params, "part": "abort and rebuild, plain torch"},
                   {"idle_us": distribution(answer["idle_us"]), "rebuilt_us": distribution(answer["rebuilt_us"])})


def main() -> int:
    built = ROOT / "build" / "release"
    parser = argparse.ArgumentParser(description="Length of pauses of all GPUs of a job.")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="measure this alone; may be repeated")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--pauses", type=int, default=1000, help="of all ranks, and of one (default %(default)s)")
    parser.add_argument("--handovers", type=int, default=300, help="at most (default %(default)s)")
    parser.add_argument("--handover-seconds", type=int, default=120, help="(default %(default)s)")
    parser.add_argument("--rebuilds", type=int, default=20, help="(default %(default)s)")
    parser.add_argument("--sluice", type=Path, default=built / "bin" / "sluice")
    parser.add_argument("--pauser", type=Path, default=built / "lib" / "libsluice_bench_pauser.so")
    for hidden in ("--worker", "--part", "--count", "--library", "--file"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        workload = WORKLOADS[options.worker]
        if options.part == "pauses":
            work(workload, options)
        elif options.part == "handover":
            train(workload, Path(options.file))
        else:
            rebuild(workload, int(options.count))
        return 0
    clear_up_on_sigterm()
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit("nccl_pause: needs two GPUs; a rank needs one of its own")
    os.environ[RANKS] = str(gpus)
    parts = {"pauses": pauses, "handover": handover, "rebuild": rebuilds}
    for name, workload in WORKLOADS.items():
        for part in options.parts if not options.only or name in options.only else ():
            print(f"==> {name}, {part}", flush=True)
            try:
                for cell in parts[part](workload, options):
                    write("nccl_pause", [replace(cell, params={**cell.params, "ranks": gpus})], gpus=gpus, accumulate=True)
            except Failed as failure:
                raise SystemExit(f"nccl_pause: {failure}") from failure
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
