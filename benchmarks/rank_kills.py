#!/usr/bin/env python3
"""What becomes of a job's other ranks, and of its memory, when one rank is killed at a random instant.

    ./benchmarks/run.sh rank_kills [--kills 50] [--seconds 300] [--lanes 4] [--seed 1] [--kinds replicas shards]

Jobs with a rank on each GPU, or two on the only one, train under `sluice run`, several at once, each in pools of its own, while
servers take memory from all ranks. After a random number of steps and a random time one rank gets SIGKILL. The others must end by themselves: nobody
tells them. In the end the pools must have all their memory again. A rank that has not ended after a minute counts as a hang.
Ranks are forked by a process that has loaded torch and uses neither it nor the pool.
On the host there are two ranks, which gloo connects. A run is one cell, named by its seed; the record's notes hold the sums.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import faulthandler
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from exactness import environment
from ranks import RANKS, take_gpu
from records import ROOT, Cell, distribution, single, write

PROGRESS = struct.Struct("qq")  # of a rank: its process, steps
POOL_MIB = {"host": 128, "cuda": 6 << 10}  # for each rank that shares it
DEMAND_BYTES = {"host": 20 << 20, "cuda": 3 << 30}
START_SECONDS = 180.0
END_SECONDS = 60.0
FREE_SECONDS = 30.0
#: PyTorch's watchdog sleeps four times as long before it ends a process whose communicator has failed, else a minute.
DUMP = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
MOST_STEPS = 30
DELAY_MS = 30  # between demands, for each lane: they take each other's time
SHARDS_ON_HOST = 15  # times as much there, where all ranks run again what takes two cores long
COUNTED = ("kills", "hangs", "leaked_chunks", "failed_starts")
TARGETS = {"hangs.value": "<= 0", "leaked_chunks.value": "<= 0", "failed_starts.value": "<= 0"}


# --- a rank -----------------------------------------------------------------------------------------------------------


def fork_ranks(backend: str, kind: str) -> None:
    """Forks a job's ranks whenever it is told a folder. Returns when there are no more, and in each rank when that ends."""
    import exact_job  # noqa: F401
    import exact_ranks_job  # noqa: F401

    import sluice  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        for rank in range(int(os.environ[RANKS])):
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
                work(backend, kind, rank, Path(line.rstrip("\n")))
                return


def work(backend: str, kind: str, rank: int, folder: Path) -> None:
    """Trains, and says how far it is, until it or another rank is killed."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.nn.functional as F
    from exact_job import network
    from exact_ranks_job import SIZES, sharded
    from torch import distributed, nn

    import sluice

    ranks = int(os.environ[RANKS])
    device = take_gpu(rank, ranks) if backend == "cuda" else torch.device("cpu")
    distributed.init_process_group("nccl" if backend == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank,
                                   world_size=ranks)
    width, samples, micro_batch = SIZES[device.type]
    model = network(width).to(device)
    model = sharded(model) if kind == "shards" else nn.parallel.DistributedDataParallel(model)
    step = sluice.Step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), micro_batch, adapt=False)
    if not step.shared:
        raise SystemExit("this process does not share the pool")
    x = torch.randn(samples[1], 3, 32, 32, device=device)
    y = torch.randint(10, (samples[1],), device=device)
    with (folder / f"progress.{rank}").open("wb", buffering=0) as progress:
        steps = 0
        while True:
            step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            steps += 1
            os.pwrite(progress.fileno(), PROGRESS.pack(os.getpid(), steps), 0)


# --- the process that kills -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lane:
    """Jobs one after the other, in pools of their own."""

    backend: str
    ranks: int
    devices: int
    sluice: Path
    runtime: Path
    delay_ms: int  # most between two demands
    forkers: dict[str, subprocess.Popen] = field(default_factory=dict)  # of each kind of job

    def _forker(self, kind: str) -> subprocess.Popen:
        if kind not in self.forkers or self.forkers[kind].poll() is not None:
            with self._log().open("ab") as log:
                self.forkers[kind] = subprocess.Popen(
                    [self.sluice, "run", "--require-pool", "--backend", self.backend, "--runtime-dir", self.runtime, "--memory",
                     f"{POOL_MIB[self.backend] * -(-self.ranks // self.devices)}MiB", "--", sys.executable,
                     Path(__file__).resolve(), "--worker", kind, "--backend", self.backend], stdin=subprocess.PIPE, stdout=log, stderr=log,
                    env={**environment(), RANKS: str(self.ranks), "GLOO_SOCKET_IFNAME": "lo", **DUMP})
        return self.forkers[kind]

    def _log(self) -> Path:
        return self.runtime / "ranks.log"

    def end(self) -> None:
        """Ends what forks ranks, and ranks that are left."""
        for forker in self.forkers.values():
            forker.terminate()
            forker.wait(60)
            forker.stdin.close()
        self.forkers.clear()

    def _devices(self) -> list[list[str]]:
        return [["--device", str(device)] for device in range(self.devices)] if self.backend == "cuda" else [[]]

    def run(self, kind: str, seed: int) -> dict:
        """One job and one kill."""
        dice = random.Random(seed)
        forker = self._forker(kind)
        with tempfile.TemporaryDirectory(prefix="sluice-ranks-") as name, self._demands(kind, seed):
            forker.stdin.write(f"{name}\n".encode())
            forker.stdin.flush()
            pids = self._await_steps(Path(name), forker, dice.randint(2, MOST_STEPS))
            if pids is None:
                print(f"rank_kills: a job has not started:\n{self._log().read_text()[-3000:]}", file=sys.stderr)
                self.end()
                return {"failed_starts": 1}
            time.sleep(dice.uniform(0.0, 0.1))
            found = self._kill(pids, dice.randrange(self.ranks))
            if found["hangs"]:
                print(f"rank_kills: a rank of {kind} has not ended:\n{self._log().read_text()[-6000:]}", file=sys.stderr)
            return found

    @contextlib.contextmanager
    def _demands(self, kind: str, seed: int) -> Iterator[None]:
        """A server on each device, which takes memory at random instants; another one when it has lost its job."""
        over = threading.Event()
        delay_ms = self.delay_ms * (SHARDS_ON_HOST if (self.backend, kind) == ("host", "shards") else 1)

        def take(options: list[str]) -> None:
            serve = [self.sluice.with_name("sluice-bench-handover"), "--runtime-dir", self.runtime, *options, "--bytes",
                     str(DEMAND_BYTES[self.backend]), "--count", "100000", "--delay-ms", str(delay_ms), "--seed",
                     str(seed), "--range"]
            while not over.is_set():
                with subprocess.Popen(serve, env={**environment(), "SLUICE_BROKER": str(self.sluice)}, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL) as server:
                    while server.poll() is None and not over.wait(0.05):
                        pass
                    server.terminate()

        with concurrent.futures.ThreadPoolExecutor() as threads:
            for options in self._devices():
                threads.submit(take, options)
            try:
                yield
            finally:
                over.set()

    def _await_steps(self, folder: Path, forker: subprocess.Popen, steps: int) -> list[int] | None:
        """The ranks' processes, when all have made so many steps; None if they do not."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and forker.poll() is None:
            found = []
            for rank in range(self.ranks):
                with contextlib.suppress(OSError):
                    said = (folder / f"progress.{rank}").read_bytes()
                    if len(said) == PROGRESS.size and PROGRESS.unpack(said)[1] >= steps:
                        found.append(PROGRESS.unpack(said)[0])
            if len(found) == self.ranks:
                return found
            time.sleep(0.005)
        return None

    def _kill(self, pids: list[int], victim: int) -> dict:
        handles = [os.pidfd_open(pid) for pid in pids]
        try:
            killed = time.monotonic()
            signal.pidfd_send_signal(handles[victim], signal.SIGKILL)
            hangs = 0
            for handle in handles:
                ends = select.select([handle], [], [], max(0.0, killed + END_SECONDS - time.monotonic()))[0]
                hangs += not ends
                if not ends:
                    signal.pidfd_send_signal(handle, signal.SIGUSR1)  # says where it is, in the log
                    select.select([handle], [], [], 1.0)
            ended = time.monotonic()
            for handle in handles if hangs else ():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            for handle in handles:
                os.close(handle)
        return {"kills": 1, "hangs": hangs, "ended_ms": [(ended - killed) * 1e3] if not hangs else []}

    def leaked(self) -> int:
        """Chunks that are nobody's, and yet not free, when all jobs have gone."""
        left = 0
        for options in self._devices():
            deadline = time.monotonic() + FREE_SECONDS
            while True:
                said = subprocess.run([self.sluice, "status", "--json", "--runtime-dir", self.runtime, *options],
                                      capture_output=True, check=True)
                pool = json.loads(said.stdout)["pool"]
                missing = pool["bytes"] - pool["free_bytes"] - pool["dirty_bytes"]
                if missing == 0 or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            left += -(-missing // pool["chunk_bytes"])
        return left


def run_lane(lane: Lane, kinds: list[str], seeds: list[int], over: threading.Event) -> dict:
    found: dict = {name: 0 for name in COUNTED} | {"ended_ms": []}
    try:
        for number, seed in enumerate(seeds):
            if over.is_set():
                break
            for name, value in lane.run(kinds[number % len(kinds)], seed).items():
                found[name] += value
    finally:
        lane.end()
    found["leaked_chunks"] += lane.leaked()
    end_broker(lane.runtime)
    return found


def sums(cells: list[dict]) -> list[str]:
    total = {name: sum(cell["metrics"][name]["value"] for cell in cells) for name in COUNTED}
    return [f"{len(cells)} runs in all: " + ", ".join(f"{round(value)} {name}" for name, value in total.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description="Ranks that are killed.")
    parser.add_argument("--backend", choices=["auto", "host", "cuda"], default="auto")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, help="after so long no more are begun")
    parser.add_argument("--lanes", type=int, default=4, help="jobs at once (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=["replicas", "shards"], help="of jobs, in turn; default: both")
    parser.add_argument("--preset", default="release")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        fork_ranks(options.backend, options.worker)
        return 0
    clear_up_on_sigterm()
    import torch

    gpus = torch.cuda.device_count() if options.backend != "host" else 0
    ranks = max(gpus, 2)
    backend = "cuda" if gpus else "host"
    kinds = options.kinds or ["replicas", "shards"]
    seeds = [options.seed * 100_000 + number for number in range(options.kills)]
    with contextlib.ExitStack() as stack:
        lanes = [Lane(backend, ranks, max(gpus, 1), ROOT / "build" / options.preset / "bin" / "sluice",
                      Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-lane-"))), DELAY_MS * options.lanes)
                 for _ in range(min(options.lanes, options.kills))]
        over = threading.Event()
        with concurrent.futures.ThreadPoolExecutor() as threads:
            running = [threads.submit(run_lane, lane, kinds, seeds[at::len(lanes)], over) for at, lane in enumerate(lanes)]
            try:
                concurrent.futures.wait(running, options.seconds)
            finally:
                over.set()
            parts = [each.result() for each in running]
    found = {name: sum(part[name] for part in parts) for name in COUNTED}
    if not found["kills"]:
        raise SystemExit("rank_kills: nothing was killed")
    params = {"ranks": ranks, "kinds": " ".join(kinds), "seed": options.seed, "lanes": len(lanes)}
    metrics = {name: single(value) for name, value in found.items()}
    if ended := [each for part in parts for each in part["ended_ms"]]:
        metrics["others_ended_ms"] = distribution(ended)
    cell = Cell(params, metrics, TARGETS)
    write("rank_kills", [cell], gpus=gpus, accumulate=True, summary=sums)
    return 0 if all(cell.met().values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
