"""What it costs to take a live process's memory and to give it back, on a GPU.

    ./benchmarks/run.sh parking [--gib 16] [--large-gib 40] [--rounds 5] [--only parts process small resident]

A torch process that knows nothing of Sluice keeps `--gib` GiB; a server takes all of it, first after its contents have changed
(`dirty`), then after they have not (`clean`), and gives it back, whereupon the next kernel waits until all is there. `first_chunk_ms` is a demand of one chunk, while nothing is free. `park_ratio`
and `unpark_ratio` are against one plain copy of as many bytes in the same run. `part of a large job`: 1 GiB, changed, out of a job
of `--large-gib`. `checkpoint`: the same process outside of the pool under the driver's own cuCheckpointProcess*, of which
`checkpoint_ratio` and `restore_ratio` say how many times as long it takes. `resident`: steps of GPT-2-like training under `sluice
run` with host copies against the same without Sluice, in turns.

`parts` are what it is made of: chunks copied through the ring, out and back, their hash, and each copied behind its
hash. With `--fake` the driver is the tests', whose device is the host: for trying the parts; the record lies beside the build.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pairs import Worker, in_turn, interval, typical
from records import RESULTS, ROOT, Cell, distribution, single, write

from demonstration.processes import Failed, Stage

MIB, GIB = 1 << 20, 1 << 30
PLAIN = "one plain copy of the same bytes out, same round"
PARTS = {"copy out": "out", "copy in": "in", "hash": "hash", "hash and copy out": "both"}
FIRST_CHUNK_MS = 3
STAGES = ("parts", "process", "checkpoint", "small", "resident")
CHUNK = 64 * MIB
STEP_PAIRS, STEP_WINDOW_SECONDS = 10, 0.5


def copies(build: Path, size: int, rounds: int, chunk: int = CHUNK, *, fake: bool = False) -> list[dict]:
    """Of each round the times in ms."""
    environment = dict(os.environ)
    if fake:
        environment |= {"LD_LIBRARY_PATH": str(build / "lib" / "fake_driver"), "FAKE_CUDA_MEMORY_BYTES": str(2 * size)}
    done = subprocess.run([build / "bin" / "sluice-bench-parking", "--bytes", str(size), "--chunk-bytes", str(chunk),
                           "--rounds", str(rounds)], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"parking: status {done.returncode}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure_parts(build: Path, size: int, rounds: int, chunk: int = CHUNK, *, fake: bool = False) -> list[Cell]:
    """A cell for each part, of `size` bytes in chunks of `chunk`."""
    return cells_of(copies(build, size, rounds, chunk, fake=fake), size, chunk)


def cells_of(rounds: Sequence[dict], size: int, chunk: int = CHUNK) -> list[Cell]:
    """A cell for each part."""
    return [cell(part, key, size, chunk, rounds) for part, key in PARTS.items()]


def cell(part: str, key: str, size: int, chunk: int, rounds: Sequence[dict]) -> Cell:
    """One part of all rounds."""
    metrics = {"time_ratio": single(statistics.median(one[key] / one["plain"] for one in rounds), PLAIN),
               "time_ms": distribution(one[key] for one in rounds),
               "moved_bytes_per_s": single(statistics.median(1000 * size / one[key] for one in rounds))}
    targets = {}
    if f"{key}_first" in rounds[0]:
        metrics["first_chunk_ms"] = distribution(one[f"{key}_first"] for one in rounds)
        targets["first_chunk_ms.p50"] = f"<= {FIRST_CHUNK_MS}"
    return Cell({"part": part, "size_mib": size // MIB, "chunk_mib": chunk // MIB}, metrics, targets)


class Speaker:
    """A process that answers lines with lines."""

    def __init__(self, command: list, environment: dict):
        self.process = subprocess.Popen([*map(str, command)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        found = self.process.stdout.readline()
        if not found:
            raise SystemExit(f"parking: {self.process.args[0]} has ended with status {self.process.wait()}")
        return found.strip()

    def ask(self, what: str) -> str:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


class Scene:
    """A job in a pool of its own, and a server that takes memory from it."""

    def __init__(self, build: Path, folder: str, gib: float):
        self.sluice = build / "bin" / "sluice"
        self.environment = {**os.environ, "SLUICE_RUNTIME_DIR": folder}
        pool, host = f"{int(gib * 1024) + 2048}MiB", f"{int(gib * 1024) + 1024}MiB"
        self.job = Speaker([self.sluice, "run", "--backend", "cuda", "--memory", pool, "--host-memory", host, "--require-pool", "--",
                            sys.executable, ROOT / "benchmarks" / "parking_job.py", gib], self.environment)
        self.job.line()
        self.await_job(lambda one: one["parkable_bytes"] >= gib * GIB)
        self.server = Speaker([build / "bin" / "sluice-bench-parker", "--asked"], self.environment)
        self.server.ask("0")

    def parking(self) -> dict:
        done = subprocess.run([self.sluice, "status", "--json"], capture_output=True, text=True, check=True, env=self.environment)
        return next(one["parking"] for one in json.loads(done.stdout)["clients"] if one["kind"] == "training")

    def await_job(self, holds) -> dict:
        deadline = time.monotonic() + 120
        while not holds(found := self.parking()):
            if time.monotonic() > deadline:
                raise SystemExit(f"parking: waited in vain; the job says {found}")
            time.sleep(0.02)
        return found

    def take(self, size: int) -> dict:
        """A demand of so many bytes; again while the job has only just come back."""
        for _ in range(20_000):
            answer = json.loads(self.server.ask(str(size)))
            if answer["refused"] is None:
                return answer
            if answer.get("retry_after_ms") is None:
                break
            time.sleep(0.001)
        raise SystemExit(f"parking: {answer['refused']}")

    def fill(self) -> None:
        self.job.ask("fill")

    def give_back(self) -> float:
        """The next kernel's time in ms, which waits until the memory is there."""
        self.server.ask("0")
        return float(self.job.ask("touch").split()[1])

    def end(self) -> None:
        self.server.end()
        self.job.end()


@contextlib.contextmanager
def scene(build: Path, gib: float) -> Iterator[Scene]:
    """Its job has what it was filled with in the end."""
    with tempfile.TemporaryDirectory() as folder:
        made = Scene(build, folder, gib)
        made.fill()
        yield made
        if (answer := made.job.ask("check")).split()[0] != "right":
            raise SystemExit(f"parking: the job's memory is {answer}")
        made.end()


def measure_process(build: Path, gib: float, rounds: int, plain: float) -> tuple[list[Cell], dict]:
    """All of a job's memory, changed and not, beside a plain copy's time in ms; and the medians in ms."""
    size = int(gib * GIB)
    found: dict[str, list[float]] = {name: [] for name in ("dirty", "clean", "back", "first")}
    with scene(build, gib) as of:
        for _ in range(rounds):
            of.fill()
            before = of.parking()
            found["dirty"].append(of.take(size)["latency_ms"])
            out = of.parking()
            if out["dirty_bytes"] < size:
                raise SystemExit(f"parking: not all of it was dirty: {out}")
            found["back"].append(of.give_back())
            if of.parking()["parks"] != before["parks"] + 1:
                raise SystemExit(f"parking: {of.parking()}")
            found["clean"].append(of.take(size)["latency_ms"])
            if of.parking()["clean_bytes"] < size:
                raise SystemExit(f"parking: not all of it was clean: {of.parking()}")
            of.give_back()
            of.fill()
            of.server.ask("rest")
            found["first"].append(of.take(CHUNK)["latency_ms"])
            of.give_back()
    middle = {name: statistics.median(of) for name, of in found.items()}

    same_run = "one plain copy of the same bytes out, same run"
    metrics = {"park_ratio": single(middle["dirty"] / plain, same_run), "unpark_ratio": single(middle["back"] / plain, same_run), "park_ms": distribution(found["dirty"]),
               "unpark_ms": distribution(found["back"]), "clean_ms": distribution(found["clean"]),
               "first_chunk_ms": distribution(found["first"])}
    targets = {"park_ratio.value": "<= 1.05", "unpark_ratio.value": "<= 1.05", "clean_ms.p50": "<= 20",
               "first_chunk_ms.p50": f"<= {FIRST_CHUNK_MS}"}
    return [Cell({"part": "a live process", "size_gib": gib}, metrics, targets)], middle


def measure_small(build: Path, gib: float, rounds: int) -> list[Cell]:
    """1 GiB, changed, out of a large job."""
    times = []
    with scene(build, gib) as of:
        for _ in range(rounds):
            of.fill()
            times.append(of.take(GIB)["latency_ms"])
            of.give_back()
    return [Cell({"part": "1 GiB of a large job", "size_gib": gib}, {"small_ms": distribution(times)}, {"small_ms.p50": "<= 25"})]


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = [("timeout_ms", ctypes.c_uint), ("reserved0", ctypes.c_uint), ("reserved1", ctypes.c_uint64 * 7)]


def measure_checkpoint(gib: float, rounds: int, ours: dict) -> list[Cell]:
    """The same job without Sluice under the driver's own functions, called from here."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments) -> float:
        began = time.perf_counter()
        if (result := getattr(cuda, name)(*arguments)) != 0:
            raise SystemExit(f"parking: {name} answers {result}")
        return 1000 * (time.perf_counter() - began)

    call("cuInit", 0)
    job = Speaker([sys.executable, ROOT / "benchmarks" / "parking_job.py", gib], dict(os.environ))
    job.line()
    out, back = [], []
    for _ in range(rounds):
        job.ask("fill")
        lock = LockArguments(timeout_ms=10_000)
        out.append(call("cuCheckpointProcessLock", job.process.pid, ctypes.byref(lock))
                   + call("cuCheckpointProcessCheckpoint", job.process.pid, None))
        back.append(call("cuCheckpointProcessRestore", job.process.pid, None)
                    + call("cuCheckpointProcessUnlock", job.process.pid, None))
    right = job.ask("check").split()[0] == "right"
    job.end()
    if not right:
        raise SystemExit("parking: the driver's checkpoint has changed the job's memory")
    baseline = "parking of the same process, dirty, same run"
    metrics = {"checkpoint_ratio": single(statistics.median(out) / ours["dirty"], baseline),
               "restore_ratio": single(statistics.median(back) / ours["back"], baseline),
               "checkpoint_ms": distribution(out), "restore_ms": distribution(back)}
    return [Cell({"part": "checkpoint", "size_gib": gib}, metrics, {"checkpoint_ratio.value": ">= 20", "restore_ratio.value": ">= 8"})]


def measure_steps(build: Path, couples: int) -> list[Cell]:
    """What training costs while nobody takes its memory. The host bounds these steps, and two processes that do the same then differ
    for as long as they live: so several couples of processes make steps in turn (pairs.py)."""
    job = [sys.executable, ROOT / "benchmarks" / "parking_steps.py"]
    ratios, inside_ms = [], []
    for _ in range(couples):
        with Stage((build / "bin" / "sluice").absolute(), ROOT / "build" / "parking") as stage:
            inside = [stage.sluice, "run", "--backend", "cuda", "--memory", "8GiB", "--host-memory", "8GiB", "--require-pool", "--", *job]
            workers = {"plain": Worker(stage, "plain", job), "sluice": Worker(stage, "sluice", inside)}
            ms, _ = in_turn(workers, STEP_PAIRS, STEP_WINDOW_SECONDS)
        ratios.append([ours / plain for plain, ours in zip(ms["plain"], ms["sluice"])])
        inside_ms += ms["sluice"]
    return [Cell({"part": "resident", "couples": couples, "pairs": STEP_PAIRS},
                 {"step_ratio": single(typical(ratios), "the same without Sluice, in turns", interval(ratios)),
                  "step_ms": distribution(inside_ms)},
                 {"step_ratio.value": "<= 1.005"})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=[*STAGES], help="checkpoint needs process")
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--large-gib", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=6, help="couples of processes whose steps are compared")
    parser.add_argument("--preset", default="release")
    parser.add_argument("--fake", action="store_true", help="with --only parts, over the tests' driver")
    chosen = parser.parse_args()
    build = ROOT / "build" / chosen.preset

    def record(cells: list[Cell]) -> None:
        """As they come, so that nothing is lost where a later one fails."""
        write("parking", cells, gpus=0 if chosen.fake else 1, accumulate=True, folder=build / "results" if chosen.fake else RESULTS)

    if "checkpoint" in chosen.only and "process" not in chosen.only:
        parser.error("checkpoint is measured against process: --only process checkpoint")
    if "parts" in chosen.only or "process" in chosen.only:
        size = int(chosen.gib * GIB)
        parts = copies(build, size, chosen.rounds, fake=chosen.fake)
        record(cells_of(parts, size))
    if "process" in chosen.only:
        of_process, ours = measure_process(build, chosen.gib, chosen.rounds, statistics.median(one["plain"] for one in parts))
        record(of_process)
    if "checkpoint" in chosen.only:
        record(measure_checkpoint(chosen.gib, 2, ours))
    if "small" in chosen.only:
        record(measure_small(build, chosen.large_gib, chosen.rounds))
    if "resident" in chosen.only:
        try:
            record(measure_steps(build, chosen.turns))
        except Failed as failure:
            raise SystemExit(f"parking: {failure}") from failure


if __name__ == "__main__":
    main()
