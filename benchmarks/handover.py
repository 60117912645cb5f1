"""Handover latency by size, while a job trains: demand → memory usable by the server, and its phases.

For each size a job whose arena is larger trains under `sluice run`; the benchmark's server waits until the arena holds
the size, lets a random time pass, and takes it. Discards, the memory's return and training's recovery happen between.
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
from brokers import clear_up_on_sigterm, end_broker
from records import ROOT, Cell, distribution, write

MIB = 1 << 20
PHASES = ("latency_us", "notify_us", "gate_us", "drain_us", "revoke_us", "ledger_us", "map_us")

#: Size of the handover → the training job whose arena exceeds it (see jobs.py) and how many handovers are taken.
HOST = {
    16: (["--width", "512", "--depth", "8", "--samples", "2048"], 200),
    64: (["--width", "512", "--depth", "12", "--samples", "4096"], 100),
    256: (["--width", "512", "--depth", "24", "--samples", "8192"], 60),
    1024: (["--width", "512", "--depth", "32", "--samples", "24576"], 12),
}
CUDA = {
    1024: (["--width", "4096", "--depth", "16", "--samples", "8192"], 200),
    8192: (["--width", "4096", "--depth", "24", "--samples", "32768"], 60),
    65536: (["--width", "4096", "--depth", "40", "--samples", "65536"], 12),
}
TARGETS = {("host", 256): {"latency_us.p50": "<= 15000"}}


def measure(backend: str, mib: int, job: list[str], count: int, binaries: Path) -> dict:
    """Metrics of `count` handovers of `mib` MiB."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        os.chmod(folder, 0o700)
        environment = {**os.environ, "SLUICE_BROKER_IDLE_EXIT_MS": "2000", "OMP_NUM_THREADS": "2"}
        memory = ["--memory", f"{3 * mib + 256}MiB"] if backend == "host" else []
        training = subprocess.Popen(
            [binaries / "sluice", "run", "--backend", backend, "--runtime-dir", folder, *memory, "--",
             sys.executable, ROOT / "benchmarks" / "jobs.py", "--device", "cuda" if backend == "cuda" else "cpu", *job],
            env=environment,
        )
        try:
            # The job needs some seconds until its first micro-batch; the server's wait for the arena covers that.
            done = subprocess.run(
                [binaries / "sluice-bench-handover", "--runtime-dir", folder, "--bytes", str(mib * MIB),
                 "--count", str(count), "--delay-ms", "100"],
                env={**environment, "SLUICE_BROKER": str(binaries / "sluice")}, capture_output=True, text=True,
                check=False,
            )
        finally:
            training.terminate()
            training.wait()
            end_broker(folder)
        if done.returncode != 0:
            raise SystemExit(f"{mib} MiB: {done.stderr.strip()}")
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    if short := [s for s in samples if s["bytes_reclaimed"] < 0.9 * mib * MIB]:
        raise SystemExit(f"{mib} MiB: {len(short)} handovers took less than 90 % of their size from training")
    metrics = {phase: distribution([sample[phase] for sample in samples]) for phase in PHASES}
    metrics["rest_us"] = distribution([s["latency_us"] - s["gate_us"] - s["drain_us"] for s in samples])
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--sizes", type=int, nargs="*", help="MiB; default: all")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    sizes = HOST if args.backend == "host" else CUDA
    cells = []
    for mib, (job, count) in sizes.items():
        if args.sizes and mib not in args.sizes:
            continue
        metrics = measure(args.backend, mib, job, count, ROOT / "build" / args.preset / "bin")
        cells.append(Cell({"size_mib": mib, "job": " ".join(job)}, metrics, TARGETS.get((args.backend, mib), {})))
        print(f"{mib} MiB done", file=sys.stderr, flush=True)
    write("handover", cells, gpus=1 if args.backend == "cuda" else 0, accumulate=bool(args.sizes))


if __name__ == "__main__":
    main()
