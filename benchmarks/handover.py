"""Handover latency by size, while a job trains: demand → memory usable by the server, and its phases.

For each size a job whose arena is larger trains under `sluice run`; the benchmark's server waits until the arena holds
the size, lets a random time pass, and takes it. Discards, the memory's return and training's recovery happen between.
A handover counts where at least 90 % of its bytes came from a micro-batch that was running, on the host from training,
which gives first what it does not use; the others are counted apart.
The server takes a language model's tensors of that size, as in earnest, or with --range one range, which has to be
stitched where the chunks are no neighbours. With --habits the main thread of training does something else besides, and
every handover counts; with --awake the thread that answers demands does not sleep (SLUICE_CONTROL_THREAD).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from brokers import clear_up_on_sigterm, job_in_pool
from jobs import HABITS
from records import ROOT, Cell, distribution, single, write

MIB = 1 << 20
PHASES = ("notify_us", "gate_us", "drain_us", "revoke_us", "ledger_us", "map_us")


@dataclass(frozen=True)
class Size:
    """A handover of `mib` MiB: the job whose arena exceeds it (see jobs.py), how many are taken, the pool if not all."""

    mib: int
    job: tuple[str, ...]
    count: int
    delay_ms: int
    pool: str | None = None


HOST = (
    Size(16, ("--width", "512", "--depth", "8", "--samples", "2048"), 200, 100),
    Size(64, ("--width", "512", "--depth", "12", "--samples", "4096"), 100, 100),
    Size(256, ("--width", "512", "--depth", "24", "--samples", "8192"), 60, 100),
    Size(1024, ("--width", "512", "--depth", "32", "--samples", "24576"), 12, 100),
)
# Larger by depth, so that no kernel is longer than in the models as they are; and each job with the smaller sizes, since
# what a handover takes follows from the job, not from the size.
RESNET50 = ("--model", "resnet50", "--samples", "128")
GPT2_MEDIUM = ("--model", "gpt2", "--depth", "24", "--samples", "8")
GPT2_DEEP = ("--model", "gpt2", "--depth", "88", "--samples", "8")
CUDA = (
    Size(1024, RESNET50, 1000, 25, "14GiB"),
    Size(1024, GPT2_MEDIUM, 1000, 80, "44GiB"),
    Size(8192, GPT2_MEDIUM, 1000, 80, "44GiB"),
    Size(1024, GPT2_DEEP, 1000, 250, "112GiB"),
    Size(8192, GPT2_DEEP, 1000, 250, "112GiB"),
    Size(65536, GPT2_DEEP, 1000, 250, "112GiB"),
)
TARGETS = {
    "host": {256: {"latency_us.p50": "<= 15000"}},
    "cuda": dict.fromkeys((1024, 8192, 65536), {
        "latency_us.p50": "<= 500", "short_unit_latency_us.p99": "<= 2000", "excess_us.p99": "<= 1000",
        "rest_us.p50": "<= 60", "rest_us.p99": "<= 300",
    }),
}
HABIT_COUNT = 100
#: What a demand meets longer than that is the job's own; `short_unit_latency_us` leaves it out.
LONGEST_UNIT_US = 1000


def measure(backend: str, size: Size, binaries: Path, habit: str | None = None, options: Sequence[str] = (),
            awake: bool = False) -> dict:
    """Metrics of the handovers of one size; `options` go to the server that takes the memory."""
    mib, job = size.mib, [*size.job, *(("--habit", habit) if habit else ())]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        os.chmod(folder, 0o700)
        environment = {**os.environ, "SLUICE_BROKER_IDLE_EXIT_MS": "2000", "OMP_NUM_THREADS": "2",
                       "SLUICE_CONTROL_THREAD": "awake" if awake else "asleep"}
        memory = ["--memory", size.pool or f"{3 * mib + 256}MiB"]
        command = [sys.executable, ROOT / "benchmarks" / "jobs.py", "--device", "cuda" if backend == "cuda" else "cpu", *job]
        with job_in_pool(binaries / "sluice", backend, folder, memory, command, environment):
            # The job needs some seconds until its first micro-batch; the server's wait for the arena covers that.
            done = subprocess.run(
                [binaries / "sluice-bench-handover", "--runtime-dir", folder, "--bytes", str(mib * MIB),
                 "--count", str(size.count), "--delay-ms", str(size.delay_ms), "--fill",
                 *([] if habit else [{"host": "--reclaimed", "cuda": "--live"}[backend]]), *options],
                env={**environment, "SLUICE_BROKER": str(binaries / "sluice")}, capture_output=True, text=True,
                check=False,
            )
        if done.returncode != 0:
            raise SystemExit(f"{mib} MiB: {done.stderr.strip()}")
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    counted = [sample for sample in samples if sample["counts"]]
    if not counted:
        raise SystemExit(f"{mib} MiB: none of {len(samples)} handovers counts")
    metrics = {"latency_us": distribution(sample["latency_us"] for sample in counted)}
    metrics["excess_us"] = distribution(sample["latency_us"] - sample["unit_us"] for sample in counted)
    metrics["rest_us"] = distribution(s["latency_us"] - s["gate_us"] - s["drain_us"] for s in counted)
    if backend == "cuda":
        metrics["short_unit_latency_us"] = distribution(
            sample["latency_us"] for sample in counted if sample["unit_us"] <= LONGEST_UNIT_US)
        metrics["first_kernel_us"] = distribution(sample["first_kernel_us"] for sample in counted)
    metrics |= {phase: distribution([sample[phase] for sample in counted]) for phase in PHASES}
    metrics["live_percent"] = single(100 * sum(sample["live"] for sample in samples) / len(samples))
    metrics["stitched_percent"] = single(100 * sum(sample["stitched"] > 0 for sample in counted) / len(counted))
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--sizes", type=int, nargs="*", help="MiB; default: all")
    parser.add_argument("--job", default="", help="only the jobs whose arguments contain this, such as 'depth 88'")
    parser.add_argument("--count", type=int, help="handovers of each size, instead of what the size says")
    parser.add_argument("--habits", nargs="*", choices=HABITS, default=[], help="see jobs.py")
    parser.add_argument("--awake", action="store_true", help="the thread that answers does not sleep")
    parser.add_argument("--range", action="store_true", help="one range instead of a model's tensors")
    parser.add_argument("--seconds", type=int, help="each size ends with fewer handovers after so long")
    parser.add_argument("--seed", type=int, default=1, help="of the demands' instants; another one makes another cell")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    cells = []
    options = ["--seed", str(args.seed), *(["--range"] if args.range else []),
               *(["--seconds", str(args.seconds)] if args.seconds else [])]
    for size in HOST if args.backend == "host" else CUDA:
        if (args.sizes and size.mib not in args.sizes) or args.job not in " ".join(size.job):
            continue
        for habit in args.habits or (None,):
            part = replace(size, count=args.count or (HABIT_COUNT if habit else size.count))
            metrics = measure(args.backend, part, ROOT / "build" / args.preset / "bin", habit, options,
                              args.awake)
            params = {"size_mib": size.mib, "job": " ".join(size.job), "placement": "range" if args.range else "tensors",
                      "seed": args.seed, **({"habit": habit} if habit else {}),
                      **({"control_thread": "awake"} if args.awake else {})}
            cells.append(Cell(params, metrics, TARGETS[args.backend].get(size.mib, {})))
            print(f"{params} done", file=sys.stderr, flush=True)
    write("handover", cells, gpus=1 if args.backend == "cuda" else 0, accumulate=True)


if __name__ == "__main__":
    main()
