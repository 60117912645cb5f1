#!/usr/bin/env python3
"""What it costs replicas of a model, and shards, that their ranks agree on each collective, against plain PyTorch's.

    ./benchmarks/run.sh nccl_overhead [--backend auto|host|cuda] [--jobs 1] [--pairs 12] [--window 2] [--asked] [--all-reduces]
    [--jitter-ms 0 1]

Two jobs of several processes make the same steps of the same model in turn (pairs.py): DistributedDataParallel, or a model that
fully_shard was given, by itself, and in `sluice.Step` under `sluice run`. Once as they are, and once with one rank that sleeps up
to a millisecond before each step. Before that, unless --only names models, other jobs make all-reduces of several sizes, one after
another (all_reduces.py). There is a rank for each GPU; on the host, where gloo is all there is and nobody has to agree, two, without a
target.

The thread that trains has the same processor in both jobs, one for each rank: where the host bounds a step, what a processor
happens to share its core with says more than anything else.

Ranks ask each other while one of them has a server, and where they work together inside of micro-batches, as shards do. With --asked
replicas do as well, and launches are bounded, as if one had a server.
"""

import argparse
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import all_reduces
from all_reduces import ASKED
from brokers import clear_up_on_sigterm
from overhead_models import WORKLOADS, Workload  # also finds the examples
from pairs import ROOT, Comparison
from pause import DEFAULT_WAY, Pauser, bound_of
from ranks import RANKS, all_ranks, make_replica, on_processor_of_its_own
from records import Cell, write

from demonstration.processes import Failed

KEYS = ("host-charlm-1", "cuda-resnet50-1", "cuda-gpt2-medium-1", "cuda-gpt2-xl-sharded-1")
TARGET = {"step_ratio.value": "<= 1.02"}
JITTER = "SLUICE_BENCH_JITTER_MS"


# --- the processes that are measured ----------------------------------------------------------------------------------


def work(workload: Workload, shared: bool) -> None:
    """One rank: makes as many steps as the first reads from standard input."""
    from torch import distributed

    with all_ranks() as ranks:
        replica = make_replica(workload, ranks, shared)
        jitter_s = float(os.environ[JITTER]) / 1e3 if ranks.rank == 1 else 0.0
        dice = random.Random(ranks.rank)
        if shared and ASKED in os.environ:
            Pauser(Path(os.environ[ASKED])).bound(*bound_of(DEFAULT_WAY), replica.owner)

        for line in ranks.messages():
            with on_processor_of_its_own(ranks, workload.backend):
                distributed.barrier()
                replica.synchronize()
                started = time.perf_counter()
                for _ in range(int(line)):
                    if jitter_s > 0.0:
                        time.sleep(dice.uniform(0.0, jitter_s))
                    replica.step()
                replica.synchronize()
                seconds = time.perf_counter() - started
            ranks.answer({"seconds": seconds, "discards": replica.owner.stats()["discards"] if shared else 0})
        distributed.destroy_process_group()


# --- the process that measures ----------------------------------------------------------------------------------------


def undisturbed(workload: Workload, last: dict[str, dict]) -> tuple[dict, dict]:
    """No metrics of its own, and the target. Raises Failed if the run was disturbed."""
    if discards := last["sluice"]["discards"]:
        raise Failed(f"{workload.name}: {discards} micro-batches were discarded though nothing asked for memory")
    return {}, TARGET if workload.backend == "cuda" else {}


def _milliseconds(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--asked", action="store_true", help="as if a server were there, for which replicas ask each other")
    parser.add_argument("--all-reduces", action="store_true", help="measure these alone, and no steps")
    parser.add_argument("--jitter-ms", type=_milliseconds, nargs="+", default=[0, 1], metavar="MS",
                        help="the most that rank 1 sleeps before each step; may be several (default 0 1)")


def main() -> int:
    comparison = Comparison(
        "nccl_overhead", "Cost of agreeing on collectives.", Path(__file__).resolve(), "sluice", KEYS, pairs=12, more=undisturbed)
    options = comparison.options(add_options)
    if options.worker:
        workload = WORKLOADS[options.worker]
        work(workload, options.shared)
        return 0
    clear_up_on_sigterm()
    import torch

    if options.asked:
        os.environ[ASKED] = str(ROOT / "build" / "release" / "lib" / "libsluice_bench_pauser.so")
    gpus = torch.cuda.device_count() if options.backend != "host" else 0
    if gpus == 1:
        raise SystemExit("nccl_overhead: this machine has one GPU; a rank needs one of its own")
    os.environ[RANKS] = str(gpus or 2)
    if not gpus:  # ranks share the processors
        os.environ |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)), "OMP_WAIT_POLICY": "passive"}
    backend = "cuda" if gpus else "host"

    def record(cells: list[Cell], more: dict) -> None:
        """At once: what has been measured is not lost with what comes after it."""
        params = more | ({"asked": True} if options.asked else {})
        write(comparison.name, [replace(cell, params=cell.params | params) for cell in cells], gpus=gpus, accumulate=True)

    if options.all_reduces or not options.only:
        try:
            record(all_reduces.measure(backend, options.sluice.absolute()), {})
        except Failed as failure:
            raise SystemExit(f"nccl_overhead: {failure}") from failure
    for jitter_ms in [] if options.all_reduces else options.jitter_ms:
        os.environ[JITTER] = str(jitter_ms)
        how = {"ranks": gpus or 2, "jitter_ms": jitter_ms}
        for note in comparison.measured(options, lambda cell, how=how: record([cell], how))["notes"]:
            print(note)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
