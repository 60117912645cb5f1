"""SIGKILL at random instants: whether what the dead held comes free, at once, and everybody else goes on.

Clients are training roles of sluice-bench-kills without torch, the same with eight forked workers that inherit the
pool, or a job of sluice.Step with eight data workers; a server takes and gives back memory all the time. Victims are
trainers, the server and the broker. A run is one cell, named by its seed: several runs add up over the cells, and the
record's notes hold the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from brokers import clear_up_on_sigterm
from exactness import BENCHMARKS, ROOT, environment
from records import Cell, distribution, single, write

MIB = 1 << 20
LABELS = {"c++": "c++", "workers": "c++ with 8 workers", "torch": "torch"}
COUNTED = ("kills", "killed_trainers", "killed_servers", "killed_brokers", "leaked_chunks", "hangs", "server_errors",
           "wrong_contents", "failed_starts", "served")
TIMED = ("free_after_last_exit_us", "free_without_broker_us", "free_with_server_us", "serving_free_us", "teardown_us",
         "broker_back_us")
TARGETS = {"leaked_chunks.value": "<= 0", "hangs.value": "<= 0", "server_errors.value": "<= 0",
           "wrong_contents.value": "<= 0", "free_after_last_exit_us.p99": "<= 20000"}


def sizes(clients: str, backend: str, memory: int | None) -> dict[str, int]:
    """Bytes of pool, chunk, micro-batch and the server's largest acquisition; and how many trainers there are."""
    if clients == "torch":
        pool = memory or (192 * MIB if backend == "host" else 4096 * MIB)
        return {"memory": pool, "chunk": 2 * MIB, "bytes": 0, "server-bytes": pool // 2, "trainers": 2}
    pool = memory or (64 * MIB if backend == "host" else 1024 * MIB)
    return {"memory": pool, "chunk": pool // 1024 if backend == "host" else 2 * MIB, "bytes": pool * 3 // 8,
            "server-bytes": pool * 5 // 8, "trainers": 2 if backend == "host" else 4}


def job_command(backend: str, folder: Path, binaries: Path) -> list[str]:
    """A job that trains until it is killed."""
    device = ["--device", "cpu"] if backend == "host" else ["--device", "cuda", "--width", "64", "--batch", "512"]
    return [str(word) for word in (
        binaries / "sluice", "run", "--backend", backend, "--runtime-dir", folder, "--require-pool", "--",
        sys.executable, BENCHMARKS / "exact_job.py", *device, "--workers", 8, "--until", folder / "never",
        "--out", folder / "nothing")]


def measure(args: argparse.Namespace, binaries: Path) -> dict:
    """What sluice-bench-kills says of one run."""
    with tempfile.TemporaryDirectory(prefix="sluice-kills-") as name:
        folder = Path(name)
        options = [f"--{option}={value}" for option, value in
                   sizes(args.clients, args.backend, args.memory).items()]
        if args.clients == "workers":
            options.append("--workers=8")
        if args.clients == "torch":
            options += ["--trainer", json.dumps(job_command(args.backend, folder, binaries))]
        done = subprocess.run(
            [binaries / "sluice-bench-kills", "--runtime-dir", folder, "--backend", args.backend,
             "--kills", str(args.kills), "--seconds", str(args.seconds), "--seed", str(args.seed), *options],
            env={**environment(), "SLUICE_BROKER": str(binaries / "sluice"), "SLUICE_BROKER_IDLE_EXIT_MS": "1000",
                 "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit("the run has failed")
    return json.loads(done.stdout)


def sums(cells: list[dict]) -> list[str]:
    """One line for each kind of clients over all runs."""
    lines = []
    for label in dict.fromkeys(cell["params"]["clients"] for cell in cells):
        of = [cell["metrics"] for cell in cells if cell["params"]["clients"] == label]
        total = {name: sum(metrics[name]["value"] for metrics in of) for name in COUNTED}
        lines.append(f"{label}, all runs: " + ", ".join(f"{name} {value}" for name, value in total.items()))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--clients", choices=LABELS, default="c++")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=240, help="a run ends after so long; another may follow")
    parser.add_argument("--memory", type=int, help="bytes of the pool")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    said = measure(args, ROOT / "build" / args.preset / "bin")
    metrics = {name: single(said[name]) for name in COUNTED}
    metrics |= {name: distribution(said[name]) for name in TIMED if said[name]}
    cell = Cell({"clients": LABELS[args.clients], "seed": args.seed}, metrics,
                {target: bound for target, bound in TARGETS.items() if target.rpartition(".")[0] in metrics})
    gpus = 1 if args.backend == "cuda" else 0
    write("kills", [cell], gpus=gpus, accumulate=True, summary=sums)
    return 0 if all(cell.met().values()) else 1


if __name__ == "__main__":
    os.umask(0o077)  # the pool's folder must be the user's alone
    sys.exit(main())
