"""What is gained where a job's processes are not equally fast, and batches are dealt to them by what each trains.

    ./benchmarks/run.sh balance [--seconds 20] [--neighbours 0 1 3]

Two processes train replicas of a model under `sluice run`, each on a core of its own; on the second one's core so many other
processes work. `gain_ratio` is what they train in a second with balanced parts by what they train with equal ones, in turns;
`possible_ratio` by the sum of what each trains when it trains by itself, with nothing to send.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from brokers import clear_up_on_sigterm, jobs_in_pools
from records import ROOT, Cell, single, write

RANKS = 2
JOB = ROOT / "benchmarks" / "balance_job.py"


def measure(neighbours: int, seconds: float, binaries: Path) -> Cell:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        raise SystemExit(f"balance needs {RANKS} processor cores, and may use {len(cores)}")
    with tempfile.TemporaryDirectory(prefix="sluice-balance-") as there:
        folder = Path(there)
        commands = [[sys.executable, JOB, *map(str, (
            "--rank", rank, "--ranks", RANKS, "--core", cores[rank], "--neighbours", neighbours if rank == 1 else 0, "--meeting",
            folder / "meeting", "--seconds", seconds, "--out", folder / "said.json"))] for rank in range(RANKS)]
        environment = {**os.environ, "SLUICE_BROKER": str(binaries / "sluice"), "GLOO_SOCKET_IFNAME": "lo"}
        with jobs_in_pools(binaries / "sluice", "host", folder, [(["--memory", "1GiB", "--require-pool"], command) for command in commands],
                           environment) as jobs:
            ended = [job.wait() for job in jobs]
        if any(ended):
            raise RuntimeError(f"training ended with {ended}")
        said = json.loads((folder / "said.json").read_text())
    if not said["shared"]:
        raise RuntimeError("training has not shared the pool")
    even, balanced = statistics.fmean(said["even"]), statistics.fmean(said["balanced"])
    return Cell({"ranks": RANKS, "neighbours": neighbours},
                {"balanced_per_s": single(balanced), "even_per_s": single(even, baseline="equal parts"),
                 "slow_rank_percent": single(100 * said["alone"][1] / said["alone"][0]),
                 "slow_part_percent": single(100 * said["parts"][1] / sum(said["parts"])),
                 "gain_ratio": single(balanced / even, baseline="equal parts"),
                 "possible_ratio": single(balanced / sum(said["alone"]), baseline="each by itself, added up")},
                {"gain_ratio.value": ">= 0.98" if neighbours == 0 else "> 1"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 3], help="processes on the second one's core")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    write("balance", [measure(each, args.seconds, ROOT / "build" / args.preset / "bin") for each in args.neighbours])
    return 0


if __name__ == "__main__":
    sys.exit(main())
