"""Whether one side ever sees the other's bytes: training goes on using what was taken from it, at thousands of handovers.

Every byte tells who wrote it. Two trainers write their own values all the time, also to addresses that have been taken
from them; the server looks whether its memory ever holds anything but its own value; training looks whether what it is
granted is zero. On CUDA the driver has to refuse every copy from and to revoked addresses, and a kernel that touches one
has to end in CUDA_ERROR_ILLEGAL_ADDRESS, in its own process alone: fresh trainers do that one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS
#: What sluice-bench-isolation counts and nobody may ever see.
NEVER = ("foreign_bytes", "leaked_bytes", "probes_that_saw", "server_errors")


def measure(backend: str, handovers: int, faults: int, binaries: Path, memory: int | None = None) -> dict:
    """The counts of one run, and `kernels`: how often each pair of results came (of a sound address, of a revoked one).

    Raises RuntimeError if a process fails.
    """
    pool = memory or (4 * MIB if backend == "host" else 32 * MIB)
    chunk = 32 << 10 if backend == "host" else 2 * MIB
    program = binaries / "sluice-bench-isolation"
    environment = {**os.environ, "SLUICE_BROKER": str(binaries / "sluice"), "SLUICE_BROKER_IDLE_EXIT_MS": "2000"}
    with tempfile.TemporaryDirectory(prefix="sluice-isolation-") as name:
        folder = Path(name)
        counts = folder / "counts"
        counts.write_bytes(bytes(4096))

        def role(which: str, *more: str) -> list:
            return [program, which, "--counts", counts, "--runtime-dir", folder, "--backend", backend,
                    f"--memory={pool}", f"--chunk={chunk}", *more]

        processes: list[subprocess.Popen] = []

        def start(*command: str) -> subprocess.Popen:
            processes.append(subprocess.Popen(role(*command), env=environment))
            return processes[-1]

        kernels: Counter = Counter()
        try:
            server = start("server", f"--handovers={handovers}", f"--bytes={pool * 3 // 4}")
            trainers = [start("trainer", f"--number={number}", f"--bytes={pool * 3 // 8}") for number in (0, 1)]
            for _ in range(faults):
                if server.poll() is not None:
                    raise RuntimeError("the server had done its handovers before all faults; ask for more handovers")
                done = subprocess.run(role("fault", f"--bytes={pool // 2}"), env=environment, capture_output=True,
                                      text=True, check=False, timeout=120)
                if done.returncode != 0:
                    raise RuntimeError(f"a faulting trainer failed otherwise: {done.stderr.strip()}")
                kernels[done.stdout.strip()] += 1
            for process in (server, *trainers):
                if process.wait():
                    raise RuntimeError(f"{process.args[1]} ended with {process.returncode}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
            end_broker(folder)
        said = subprocess.run(role("report"), capture_output=True, text=True, check=True).stdout
    return {**json.loads(said), "kernels": kernels, "faults": kernels[f"0 {ILLEGAL_ADDRESS}"]}


def main() -> int:
    import torch
    from records import Cell, single, write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--handovers", type=int, default=10_000)
    parser.add_argument("--faults", type=int, help="trainers whose kernel touches a revoked address; default: 20 on CUDA")
    parser.add_argument("--memory", type=int, help="bytes of the pool")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    gpu = args.backend == "cuda"
    faults = (20 if gpu else 0) if args.faults is None else args.faults
    said = measure(args.backend, args.handovers, faults, ROOT / "build" / args.preset / "bin", args.memory)
    print(f"kernels on a sound and on a revoked address: {dict(said['kernels'])}", file=sys.stderr)
    names = ("handovers", *NEVER, "checked_bytes", "granted_bytes", "probes", "revocations")
    metrics = {name: single(said[name]) for name in names}
    targets = {f"{name}.value": "<= 0" for name in NEVER} | {"handovers.value": f">= {args.handovers}"}
    if gpu:
        metrics["refused_percent"] = single(100 * said["refused"] / said["probes"])
        metrics["faults"] = single(said["faults"])
        targets |= {"refused_percent.value": ">= 100", "faults.value": f">= {faults}"}
    cell = Cell({"handovers": args.handovers, "faults": faults}, metrics, targets)
    write("isolation", [cell], gpus=1 if gpu else 0)
    return 0 if all(cell.met().values()) else 1


if __name__ == "__main__":
    sys.exit(main())
