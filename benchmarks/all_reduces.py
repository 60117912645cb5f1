"""What an all-reduce takes in plain PyTorch's processes and in those that `sluice run` starts; nccl_overhead's first part.

On GPUs they are made in two ways: by PyTorch, whose calls take longer than the device does with all but large ones, and by NCCL's own
call, as nccl-tests makes them. There jobs of a third kind tell where it goes: under `sluice run`, but with NCCL left alone, so that
what they take longer than plain ones is the gate's part.

What is looked for is less than what two processes that do the same differ by, for as long as they live: by where their memory
lies, or their threads. So there are several jobs of each kind, and it is the jobs that are compared, each by its median: all live
all the time, one at a time makes a window of all-reduces, and the order within a round of windows is drawn anew.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pairs import ROOT, Worker, bootstrap
from pause import DEFAULT_WAY, Pauser, bound_of
from ranks import RANKS, Ranks, all_ranks, meet, on_processor_of_its_own
from records import Cell, distribution, single

from demonstration.processes import Stage

KINDS = {"cuda": ("plain", "gate", "sluice"), "host": ("plain", "sluice")}
JOBS = {"cuda": 6, "host": 2}  # of each
MEMORY = {"cuda": "8GiB", "host": "1GiB"}  # of the pool
#: By backend: bytes, how many in a window, and rounds.
SIZES = {"cuda": ((1 << 10, 400, 60), (1 << 16, 400, 30), (1 << 22, 300, 40), (1 << 28, 40, 20)),
         "host": ((1 << 10, 50, 20), (1 << 20, 5, 20))}
WAYS = {"cuda": ("torch.distributed", "NCCL"), "host": ("torch.distributed",)}
#: From so many bytes on nothing must be measurable.
LARGE = 4 << 20
#: pauser.cpp's library, if ranks are to ask each other.
ASKED = "SLUICE_BENCH_ASKED"


# --- the processes that are measured ----------------------------------------------------------------------------------


class Nccl:
    """NCCL's own calls, on a communicator of all ranks beside PyTorch's. Raises RuntimeError with what NCCL returns."""

    class _UniqueId(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    def __init__(self, ranks: Ranks, device: Any) -> None:
        import torch
        from torch import distributed

        unique, self._on = Nccl._UniqueId(), ctypes.c_void_p()
        if ranks.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique))
        shared = [ctypes.string_at(ctypes.byref(unique), ctypes.sizeof(unique))]
        distributed.broadcast_object_list(shared, device=device)
        self._call("ncclCommInitRank", ctypes.byref(self._on), ranks.count, Nccl._UniqueId.from_buffer_copy(shared[0]), ranks.rank)
        self._stream = torch.cuda.Stream()
        self._make = Nccl._function("ncclAllReduce")
        self._all_reduces = ctypes.CDLL(str(ROOT / "build" / "release" / "lib" / "libsluice_bench_all_reduces.so"))

    def all_reduces(self, data: Any, times: int) -> None:
        """In place."""
        _raise_if("ncclAllReduce", self._all_reduces.sluice_bench_all_reduces(
            self._make, ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()), self._on,
            ctypes.c_void_p(self._stream.cuda_stream), times))

    def end(self) -> None:
        self._call("ncclCommDestroy", self._on)

    @staticmethod
    def _function(name: str) -> Any:
        """As PyTorch finds it: one that is preloaded comes first."""
        process = ctypes.CDLL(None)
        return getattr(process if hasattr(process, name) else ctypes.CDLL("libnccl.so.2"), name)

    @staticmethod
    def _call(name: str, *arguments: Any) -> None:
        _raise_if(name, Nccl._function(name)(*arguments))


def _raise_if(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{name}: {error}")


def work(backend: str, shared: bool) -> None:
    """One rank: makes what the first reads from standard input, a line `WAY BYTES ALL_REDUCES`."""
    import torch
    from torch import distributed

    synchronize = torch.cuda.synchronize if backend == "cuda" else lambda: None
    with all_ranks() as ranks:
        device = meet(backend, ranks)
        torch.zeros(1, device=device)  # on a GPU the gate joins
        if shared and ASKED in os.environ:
            Pauser(Path(os.environ[ASKED])).bound(*bound_of(DEFAULT_WAY), None)

        def by_torch(data: torch.Tensor, times: int) -> None:
            for _ in range(times):
                distributed.all_reduce(data)

        nccl = Nccl(ranks, device) if "NCCL" in WAYS[backend] else None
        ways = {"torch.distributed": by_torch} | ({"NCCL": nccl.all_reduces} if nccl else {})

        def take(way: str, size: int, count: int) -> float:
            """Returns the seconds that they took."""
            data = torch.zeros(size // 4, device=device)
            synchronize()
            ways[way](data, max(1, count // 8))  # another job has had the processors, and their caches
            distributed.barrier()
            synchronize()
            started = time.perf_counter()
            ways[way](data, count)
            synchronize()
            return time.perf_counter() - started

        for line in ranks.messages():
            with on_processor_of_its_own(ranks, backend):
                way, size, count = line.split()
                seconds = take(way, int(size), int(count))
            ranks.answer({"seconds": seconds})
        if nccl:
            nccl.end()
        distributed.destroy_process_group()


# --- the process that measures ----------------------------------------------------------------------------------------


def measure(backend: str, sluice: Path) -> list[Cell]:
    """A cell for each way and size. Raises Failed."""
    cells = []
    with Stage(sluice, ROOT / "build" / "nccl_overhead" / "all_reduces") as stage:
        worker = [sys.executable, Path(__file__).resolve(), backend]
        shared = [stage.sluice, "run", "--require-pool", "--backend", backend, "--memory", MEMORY[backend], "--", *worker, "--shared"]
        commands = {"plain": worker, "gate": ["env", "SLUICE_COLLECTIVES=plain", *shared], "sluice": shared}
        jobs = [(kind, Worker(stage, f"{kind}-{job}", commands[kind])) for job in range(JOBS[backend]) for kind in KINDS[backend]]
        dice = random.Random(0)
        for way, (size, count, rounds) in itertools.product(WAYS[backend], SIZES[backend]):
            us: list[list[float]] = [[] for _ in jobs]
            for each in range(rounds + 1):
                for at in dice.sample(range(len(jobs)), len(jobs)):
                    seconds = jobs[at][1].run(f"{way} {size} {count}")["seconds"]
                    if each > 0:  # the first one makes connections
                        us[at].append(seconds / count * 1e6)
            cells.append(_cell(way, size, backend, {kind: [samples for (of, _), samples in zip(jobs, us, strict=True) if of == kind]
                                                    for kind in KINDS[backend]}))
    return cells


def _cell(way: str, size: int, backend: str, us: dict[str, list[list[float]]]) -> Cell:
    """`us`: by kind and job, of each window."""
    typical = {kind: [statistics.median(samples) for samples in us[kind]] for kind in us}
    low, high = _interval(typical, "sluice")
    metrics = {"added_us": single(_added(typical, "sluice"), "plain torch, same run", (low, high)),
               **{f"{kind}_us": distribution(sum(us[kind], [])) for kind in us},
               **{f"{kind}_spread_us": single(max(typical[kind]) - min(typical[kind])) for kind in us}}
    if "gate" in us:
        metrics["gate_added_us"] = single(_added(typical, "gate"), "plain torch, same run", _interval(typical, "gate"))
    targets = {}
    if size >= LARGE:
        metrics["measurable_us"] = single(max(0.0, low))
        targets = {"measurable_us.value": "<= 0"}
    elif size == SIZES[backend][0][0]:
        targets = {"added_us.value": "<= 1"}
    return Cell({"all_reduce_bytes": size, "by": way, "ranks": int(os.environ[RANKS]), "jobs": JOBS[backend]}, metrics,
                targets if backend == "cuda" else {})


def _added(typical: dict[str, list[float]], kind: str) -> float:
    return statistics.median(typical[kind]) - statistics.median(typical["plain"])


def _interval(typical: dict[str, list[float]], kind: str) -> tuple[float, float]:
    """What is drawn again is jobs."""
    return bootstrap(lambda dice: _added({each: dice.choices(of, k=len(of)) for each, of in typical.items()}, kind))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=JOBS)
    parser.add_argument("--shared", action="store_true")
    chosen = parser.parse_args()
    work(chosen.backend, chosen.shared)
