"""What computes for a server is killed: how long until a request that comes at that instant is answered.

The model is warm and stays so, the server keeps listening: the request waits for the next executor. With a spare executor that
one has its libraries loaded; the baseline, in the same run, is the same server without one (`server.spare_executor: false`).
Each is killed again when the spare is ready. Answers are held against the first one's.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from pathlib import Path

import torch
from brokers import clear_up_on_sigterm
from endpoint import PATIENCE_S
from records import Cell, distribution, single, write
from warm_restart import NUMBERS, Started, a_world, add_layers


def memory_of(pid: int) -> dict[str, int]:
    """Bytes that the kernel counts for a process: resident, and with shared pages divided among those that have them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return {name: next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
            for name in ("Rss", "Pss", "Private_Dirty")}


def executor_when(server: Started, holds) -> dict:
    deadline = time.monotonic() + PATIENCE_S
    while not holds(seen := server.status()["executor"]):
        if time.monotonic() > deadline:
            raise SystemExit(f"outage: no executor is ready\n{server.log()}")
        time.sleep(0.01)
    return seen


def kill_again_and_again(server: Started, kills: int, spare: bool, question: torch.Tensor) -> tuple[list[float], int, dict]:
    right = server.ask("small", question)
    outages, wrong, memory = [], 0, {}
    for _ in range(kills):
        server.wait_until("the model would outlive its executor", lambda model: model["outlives_server"])
        seen = executor_when(server, lambda its: its["state"] == "ready" and its["spare"] == ("ready" if spare else "none"))
        if spare:
            memory = memory_of(seen["spare_pid"])
        began = time.monotonic()
        os.kill(seen["pid"], signal.SIGKILL)
        wrong += not torch.equal(server.ask("small", question), right)
        outages.append(1e3 * (time.monotonic() - began))
    return outages, wrong, memory


def measure(backend: str, kills: int) -> Cell:
    question = torch.linspace(-1, 1, NUMBERS).reshape(1, NUMBERS)
    with a_world(backend, 2**30) as world:
        add_layers(world.repository, "small", 2, 32, question)
        server = world.serve("small", ", spare_executor: false")
        without, wrong_without, _ = kill_again_and_again(server, kills, False, question)
        server.end()
        server = world.serve("small")
        with_spare, wrong, memory = kill_again_and_again(server, kills, True, question)
        log = server.log()
        server.end()
    prepared = re.findall(r"ready to take an executor's place after_ms=(\d+)(?: device_bytes=(\d+))?", log)
    metrics = {f"spare_{name.lower()}_bytes": single(value) for name, value in memory.items()}
    metrics["spare_prepared_ms"] = distribution([float(took) for took, _ in prepared])
    if on_device := [float(taken) for _, taken in prepared if taken]:
        metrics["spare_device_bytes"] = distribution(on_device)
    return Cell({"backend": backend, "kills": kills},
                {"outage_ms": distribution(with_spare), "outage_without_spare_ms": distribution(without),
                 "wrong": single(wrong + wrong_without), **metrics},
                {"wrong.value": "<= 0"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--kills", type=int, default=20, help="of each kind of server (default %(default)s)")
    options = parser.parse_args()
    clear_up_on_sigterm()
    write("outage", [measure(options.backend, options.kills)], gpus=int(options.backend == "cuda"),
          notes=["outage_ms: from the kill of the executor to the answer of a request that was sent then"])


if __name__ == "__main__":
    main()
