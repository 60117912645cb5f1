"""What is gained where a step may compute activations again in backward, at three amounts of memory beside a server.

    ./benchmarks/run.sh recomputation [--memory 20MiB 32MiB 96MiB] [--seconds 20] [--rounds 2]

A job trains GPT-2 (medium on a GPU) under `sluice run` in a pool of so much memory, while a server takes some of it for a moment
now and then: once with activations that are kept, once with ones that are always computed again, and once with `recompute`, in
turns. `gain_ratio` is what the last trains in a second by the better one of the others. And once with slices that do not adapt, in
the least memory and without a pool: `bit_equal` says whether the weights are the same.
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
from records import ROOT, Cell, single, write

WAYS = ("kept", "again", "chosen")
#: Amounts of memory; what the server takes, in MiB; samples of a slice that does not adapt.
MEMORY = {"host": (("20MiB", "32MiB", "96MiB"), 4, 8), "cuda": (("14GiB", "24GiB", "80GiB"), 512, 4)}
#: Between two demands at most.
MOST_DELAY_MS = 4000
#: Of the two runs whose weights are compared.
STEPS = 6


def environment(binaries: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "SLUICE_BROKER": str(binaries / "sluice"),
            "HF_HUB_OFFLINE": "1"}


def command_of(backend: str, *options: object) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / "recomputation_job.py"), "--backend", backend, *map(str, options)]


def train(backend: str, memory: str, mib: int, binaries: Path, *options: object) -> dict:
    """What a job in such a pool says. Raises RuntimeError if it or the server fails."""
    with tempfile.TemporaryDirectory(prefix="sluice-recompute-") as there:
        folder = Path(there)
        with job_in_pool(binaries / "sluice", backend, folder, ["--memory", memory, "--require-pool"],
                         command_of(backend, *options, "--out", folder / "said.json"), environment(binaries)) as training:
            server = subprocess.Popen(
                [binaries / "sluice-bench-handover", "--runtime-dir", folder, "--bytes", str(mib << 20), "--count", "1000000",
                 "--delay-ms", str(MOST_DELAY_MS), "--range"], env=environment(binaries), stdout=subprocess.DEVNULL)
            ended = training.wait()
            still_served = server.poll() is None
            server.terminate()
            server.wait()
        if ended != 0 or not still_served:
            raise RuntimeError(f"training ended with {ended}, the server with {server.returncode}")
        return json.loads((folder / "said.json").read_text())


def measure(backend: str, memory: str, mib: int, seconds: float, rounds: int, binaries: Path) -> Cell:
    said = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            said[way].append(train(backend, memory, mib, binaries, "--activations", way, "--warm-up", seconds / 2, "--seconds", seconds))
    rate = {way: max(each["samples_per_s"] for each in said[way]) for way in WAYS}
    stats = said["chosen"][-1]["stats"]
    better = max(rate["kept"], rate["again"])
    return Cell({"memory": memory, "server_mib": mib},
                {"chosen_per_s": single(rate["chosen"]), "kept_per_s": single(rate["kept"], baseline="activations are always kept"),
                 "again_per_s": single(rate["again"], baseline="activations are always computed again"),
                 "gain_ratio": single(rate["chosen"] / better, baseline="the better of both"),
                 "recomputed_percent": single(100 * stats["recomputed"] / stats["commits"]), "discards": single(stats["discards"])},
                {"gain_ratio.value": ">= 1"})


def compare(backend: str, memory: str, mib: int, micro_batch: int, binaries: Path) -> Cell:
    how = ("--activations", "chosen", "--fixed", "--steps", STEPS, "--micro-batch", micro_batch)
    shared = train(backend, memory, mib, binaries, *how)
    with tempfile.TemporaryDirectory(prefix="sluice-recompute-") as there:
        out = Path(there) / "said.json"
        subprocess.run([*command_of(backend, *how), "--out", out], env={**environment(binaries), "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "runtime" / "python"), os.environ.get("PYTHONPATH", "")])}, check=True)
        alone = json.loads(out.read_text())
    if not shared["shared"] or alone["shared"]:
        raise RuntimeError("one job was to share the pool, and the other was not")
    stats = shared["stats"]
    return Cell({"memory": memory, "server_mib": mib, "micro_batch": micro_batch, "adapt": False},
                {"bit_equal": single(int(shared["digest"] == alone["digest"])),
                 "recomputed_percent": single(100 * stats["recomputed"] / stats["commits"]), "discards": single(stats["discards"])},
                {"bit_equal.value": ">= 1", "recomputed_percent.value": "> 0"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=MEMORY, default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--memory", nargs="+", help="of pools; the least first")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run, behind half as many that do not count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    amounts, mib, micro_batch = MEMORY[args.backend]
    amounts = args.memory or amounts
    binaries = ROOT / "build" / args.preset / "bin"

    def record(cell: Cell) -> None:
        """As they come, so that nothing is lost where a later one fails."""
        write("recomputation", [cell], gpus=1 if args.backend == "cuda" else 0, accumulate=True)

    for memory in amounts:
        record(measure(args.backend, memory, mib, args.seconds, args.rounds, binaries))
    record(compare(args.backend, amounts[0], mib, micro_batch, binaries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
