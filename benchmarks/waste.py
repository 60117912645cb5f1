"""How much of training's work is for nothing when a server takes its memory, and how soon it goes on.

    ./benchmarks/run.sh waste [--only cuda-resnet50-1] [--handovers 60] [--per-minute 30] [--size 1024]

A job (waste_job.py) trains under `sluice run`; a server takes memory out of its running micro-batches at random instants
and gives it back at once. What a discarded micro-batch had run until its memory went is discarded work. It is in
proportion to the handovers, so that they may be more frequent here than in use: `discarded_percent` is what a handover
discards, times six a minute. `retry_us` is from the gate's reopening until the micro-batch is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from brokers import clear_up_on_sigterm, job_in_pool
from overhead_models import WORKLOADS
from records import ROOT, Cell, distribution, single, write

MIB = 1 << 20
PER_MINUTE = 6
#: A pool that the job fills, and the MiB that are taken.
POOLS = {"host": ("256MiB", 48), "cuda-resnet50-1": ("12GiB", 1024), "cuda-gpt2-medium-1": ("40GiB", 1024),
         "cuda-gpt2-medium-4": ("24GiB", 1024), "cuda-vit-l-16-1": ("40GiB", 1024)}
TARGETS = {"cuda": {"discarded_percent.value": "<= 1", "retry_us.p50": "<= 15000"}, "host": {}}


def measure(name: str, handovers: int, most_delay_ms: int, mib: int, pool: str, binaries: Path) -> tuple[dict, int]:
    """What the job says, and how many demands took memory that was in use. Raises RuntimeError if a process failed."""
    backend = WORKLOADS[name].backend
    with tempfile.TemporaryDirectory(prefix="sluice-waste-") as there:
        folder = Path(there)
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "SLUICE_BROKER": str(binaries / "sluice")}
        with job_in_pool(binaries / "sluice", backend, folder, ["--memory", pool, "--require-pool"],
                         [sys.executable, ROOT / "benchmarks" / "waste_job.py", "--workload", name,
                          "--until", folder / "enough", "--out", folder / "said.json"], environment) as training:
            server = subprocess.run(
                [binaries / "sluice-bench-handover", "--runtime-dir", folder, "--bytes", str(mib * MIB), "--count",
                 str(handovers), "--delay-ms", str(most_delay_ms), "--fill",
                 {"host": "--reclaimed", "cuda": "--live"}[backend]],
                env=environment, capture_output=True, text=True, check=False)
            (folder / "enough").touch()
            if server.returncode != 0:
                raise RuntimeError(server.stderr.strip())
            if training.wait(120) != 0:
                raise RuntimeError(f"training ended with {training.returncode}")
        said = json.loads((folder / "said.json").read_text())
    return said, sum(json.loads(line)["counts"] for line in server.stdout.splitlines())


def metrics_of(said: dict, taken: int) -> dict:
    discarded_ms = [each for _, each in said["retries"]]
    return {"handovers": single(taken), "discards": single(len(said["retries"])),
            "discarded_percent": single(sum(discarded_ms) / 1e3 / taken * PER_MINUTE / 60 * 100),
            "discarded_ms": distribution(discarded_ms),
            "retry_us": distribution(retry for retry, _ in said["retries"]),
            "step_ms": single(1e3 * said["seconds"] / said["steps"])}


def main() -> int:
    names = [name for name in WORKLOADS if name in POOLS or WORKLOADS[name].backend == "host"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--only", nargs="*", choices=names, help="default: all of the backend")
    parser.add_argument("--handovers", type=int, default=60)
    parser.add_argument("--per-minute", type=int, default=30, help="about so many are taken")
    parser.add_argument("--size", type=int, help="MiB that each takes")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    cells = []
    for name in args.only or [name for name in names if WORKLOADS[name].backend == args.backend]:
        workload = WORKLOADS[name]
        pool, mib = POOLS.get(name, POOLS["host"])
        said, taken = measure(name, args.handovers, 2 * 60_000 // args.per_minute, args.size or mib, pool,
                              ROOT / "build" / args.preset / "bin")
        params = {**workload.params, "size_mib": args.size or mib, "per_minute": args.per_minute}
        cells.append(Cell(params, metrics_of(said, taken), TARGETS[workload.backend]))
        print(f"{name} done", file=sys.stderr, flush=True)
    write("waste", cells, gpus=1 if args.backend == "cuda" else 0, accumulate=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
