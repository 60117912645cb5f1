#!/usr/bin/env python3
"""Whether collectives stay right while the ranks that make them are paused at random instants.

    ./benchmarks/run.sh nccl_stress [--seconds 60] [--seed 1] [--algorithm ring] [--protocol simple] [--plain]

Ranks under `sluice run`, one on each GPU or several on the only one, make the same random calls, one program after another, over
one to three communicators: all-reduces, broadcasts, reductions to one rank, all-gathers and reduce-scatters, in place where that
is possible, alone and in groups; what PyTorch makes of sends and receives (all-to-all, gather, scatter, a ring); launches of a
graph that holds an all-reduce, or a ring and all-reduces of two communicators; of 8 B to 512 MiB, in any type and by any
reduction. The data are small whole numbers, so that every result is known exactly. Meanwhile all ranks are paused at one instant,
or one that is chosen by chance. A pause in which a rank does not come to rest within two seconds, and a program that does not end,
count as timeouts.

--plain leaves NCCL alone: then ranks that are paused at one instant must get stuck. A run is one cell, named by its seed; the
record's notes hold the sums over all of them. On the host, over gloo, nobody is paused, and only the first four are made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brokers import clear_up_on_sigterm
from pairs import ROOT, Worker
from pause import DEFAULT_WAY, Pauser, bound_of
from ranks import RANKS, Ranks, all_ranks, meet
from records import Cell, single, write

from demonstration.processes import Failed, Stage

OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "group", "all_to_all", "gather", "scatter",
              "ring", "graph")
BY_PEER = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")  # what is larger by as many times as there are ranks
GLOO_OPERATIONS = OPERATIONS[:4]
TYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
CALLS = 40  # of one program
POOL = {"host": "3GiB", "cuda": "14GiB"}  # for which other jobs on the GPU leave room
COMMUNICATORS = 3
GROUPED = 3  # all-reduces in a group
LARGEST_MIB = {"cuda": 512, "host": 1}
GRAPH_ELEMENTS = 1 << 16
PROGRAM_SECONDS = 60.0  # within which one ends, whatever pauses it has
NONE = 0  # the seed of no program
COUNTED = ("collectives", "wrong", "timeouts", "pauses")
TARGETS = {"wrong.value": "<= 0", "timeouts.value": "<= 0"}


@dataclass(frozen=True)
class Call:
    """The same on all ranks."""

    operation: str
    communicator: int
    type: str
    reduction: str
    bytes: int  # of what a rank gives
    root: int
    in_place: bool
    salt: int


def calls(dice: random.Random, cuda: bool, ranks: int, largest: int) -> Iterator[Call]:
    communicators = dice.randint(1, COMMUNICATORS)
    for _ in range(CALLS):
        operation = dice.choice(OPERATIONS if cuda else GLOO_OPERATIONS)
        kind = dice.choice(TYPES)
        reductions = REDUCTIONS if cuda and ("float" in kind) else REDUCTIONS[:4]
        most = largest // ranks if operation in BY_PEER else largest
        size = int(8 * (most / 8) ** dice.random())
        yield Call(operation, dice.randrange(communicators), kind, dice.choice(reductions), size, dice.randrange(ranks),
                   dice.random() < 0.5, dice.randrange(1000))


# --- a rank -----------------------------------------------------------------------------------------------------------


class Checker:
    """Makes calls, and counts those whose results are wrong."""

    def __init__(self, ranks: Ranks, device: Any, groups: list) -> None:
        import torch

        self._torch = torch
        self._ranks = ranks
        self._device = device
        self._groups = groups
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._graphs: list[tuple[Any, Any, Any]] = []  # each with its numbers, and with what comes around a ring

    @property
    def is_new(self) -> bool:
        return not self._graphs

    def make(self, call: Call) -> None:
        distributed = self._torch.distributed
        group = self._groups[call.communicator]
        by = getattr(distributed.ReduceOp, {"prod": "PRODUCT"}.get(call.reduction, call.reduction.upper()))
        own = self._given(call, self._ranks.rank)
        if call.operation == "all_reduce":
            distributed.all_reduce(own, by, group=group)
            self._check(own, self._reduced(call))
        elif call.operation == "group":
            several = [own.clone() for _ in range(GROUPED)]
            with distributed._coalescing_manager(group=group, device=self._device):
                for each in several:
                    distributed.all_reduce(each, by, group=group)
            for each in several:
                self._check(each, self._reduced(call))
        elif call.operation == "broadcast":
            distributed.broadcast(own, call.root, group=group)
            self._check(own, self._given(call, call.root))
        elif call.operation == "reduce":
            distributed.reduce(own, call.root, by, group=group)
            if self._ranks.rank == call.root:
                self._check(own, self._reduced(call))
        elif call.operation == "all_gather":
            whole = self._torch.empty(self._ranks.count * own.numel(), dtype=own.dtype, device=self._device)
            part = whole.view(self._ranks.count, -1)[self._ranks.rank]
            distributed.all_gather_into_tensor(whole, part.copy_(own) if call.in_place else own, group=group)
            self._check(whole, self._torch.cat([self._given(call, rank) for rank in range(self._ranks.count)]))
        elif call.operation == "all_to_all":
            parts = self._torch.cat([self._given(call, self._ranks.rank, of=peer) for peer in range(self._ranks.count)])
            whole = self._torch.empty_like(parts)
            distributed.all_to_all_single(whole, parts, group=group)
            self._check(whole, self._torch.cat([self._given(call, rank, of=self._ranks.rank) for rank in range(self._ranks.count)]))
        elif call.operation == "gather":
            is_root = self._ranks.rank == call.root
            parts = [self._torch.empty_like(own) for _ in range(self._ranks.count)] if is_root else None
            distributed.gather(own, parts, call.root, group=group)
            for rank, part in enumerate(parts or []):
                self._check(part, self._given(call, rank))
        elif call.operation == "scatter":
            parts = [self._given(call, call.root, of=peer) for peer in range(self._ranks.count)]
            distributed.scatter(own, parts if self._ranks.rank == call.root else None, call.root, group=group)
            self._check(own, parts[self._ranks.rank])
        elif call.operation == "ring":
            came = self._torch.empty_like(own)
            self._pass_on(own, came, group)
            self._check(came, self._given(call, self._before))
        elif call.operation == "graph":
            self._launch_graph(call)
        else:
            share = max(1, own.numel() // self._ranks.count)
            own = self._torch.cat([own] * self._ranks.count)[:share * self._ranks.count]
            place = slice(share * self._ranks.rank, share * (self._ranks.rank + 1))
            part = own[place] if call.in_place else self._torch.empty_like(own[place])
            distributed.reduce_scatter_tensor(part, own, by, group=group)
            expected = self._torch.cat([self._reduced(call)] * self._ranks.count)
            self._check(part, expected[place])

    def capture(self) -> None:
        """Makes the graphs. To be called while nobody is paused, as a capture would have to be tried again."""
        for several in (False, True):
            numbers, came = (self._torch.zeros(GRAPH_ELEMENTS, device=self._device) for _ in range(2))
            self._fill_graph(several, numbers, came)  # makes connections
            self._torch.cuda.synchronize()
            graph = self._torch.cuda.CUDAGraph()
            with self._torch.cuda.graph(graph):
                self._fill_graph(several, numbers, came)
            self._graphs.append((graph, numbers, came))

    def _fill_graph(self, several: bool, numbers: Any, came: Any) -> None:
        if several:
            self._pass_on(numbers, came, self._groups[2])
            self._torch.distributed.all_reduce(numbers, group=self._groups[1])
        self._torch.distributed.all_reduce(numbers, group=self._groups[0])

    def _launch_graph(self, call: Call) -> None:
        several = call.in_place  # there is no other place
        graph, numbers, came = self._graphs[several]
        numbers.fill_(call.salt * (self._ranks.rank + 1))
        graph.replay()
        count = self._ranks.count
        self._check(numbers, call.salt * count * (count + 1) / 2 * (count if several else 1))
        if several:
            self._check(came, call.salt * (self._before + 1))

    @property
    def _before(self) -> int:
        """The rank that sends to this one in a ring."""
        return (self._ranks.rank - 1) % self._ranks.count

    def _pass_on(self, own: Any, came: Any, group: Any) -> None:
        distributed = self._torch.distributed
        both = [distributed.P2POp(distributed.isend, own, (self._ranks.rank + 1) % self._ranks.count, group),
                distributed.P2POp(distributed.irecv, came, self._before, group)]
        for work in distributed.batch_isend_irecv(both):
            work.wait()

    def _given(self, call: Call, rank: int, of: int = 0) -> Any:
        """What a rank gives, of several parts one: numbers so small that results are exact in every type."""
        dtype = getattr(self._torch, call.type)
        count = max(1, call.bytes // dtype.itemsize)
        numbers = self._torch.arange(count, dtype=self._torch.int32, device=self._device)
        several = 2 if call.reduction == "prod" else 8
        return ((numbers * (2 * rank + 3) + call.salt + rank + 3 * of) % several + (several == 2)).to(dtype)

    def _reduced(self, call: Call) -> Any:
        given = [self._given(call, rank) for rank in range(self._ranks.count)]
        result = given[0]
        how = {"sum": self._torch.add, "avg": self._torch.add, "prod": self._torch.mul, "min": self._torch.minimum,
               "max": self._torch.maximum}[call.reduction]
        for each in given[1:]:
            result = how(result, each)
        return result / self._ranks.count if call.reduction == "avg" else result

    def _check(self, found: Any, expected: Any) -> None:
        self.wrong += (found != expected).any()


def work(options: argparse.Namespace) -> None:
    """One rank: makes the program of each seed that the first reads from standard input."""
    import torch
    from torch import distributed

    cuda = options.backend == "cuda"
    with all_ranks() as ranks:
        device = meet(options.backend, ranks)
        groups = [distributed.group.WORLD, *(distributed.new_group() for _ in range(COMMUNICATORS - 1))]
        pauser = None
        checker = Checker(ranks, device, groups)
        if cuda:
            torch.zeros(1, device=device)  # the gate joins
            pauser = Pauser(options.library)
            pauser.share(options.file, ranks.rank, ranks.count)
        for line in ranks.messages():
            dice = random.Random(int(line))
            one_rank_each = dice.random() < 0.5 and not options.plain
            checker.wrong.zero_()
            for group in groups:
                distributed.barrier(group=group)
            if cuda and checker.is_new:
                checker.capture()
            if int(line) == NONE:
                ranks.answer({})
                continue
            paused: dict = {"took_us": []}
            if pauser is not None:
                torch.cuda.synchronize()
                pauser.bound(*bound_of(DEFAULT_WAY), None)
                pauser.start(int(line), one_rank_each)
            for call in calls(dice, cuda, ranks.count, options.largest << 20):
                checker.make(call)
            if pauser is not None:
                torch.cuda.synchronize()
                paused = pauser.stop(raises=False)
            distributed.all_reduce(checker.wrong)
            ranks.answer({"collectives": CALLS, "wrong": checker.wrong.item(), "pauses": len(paused["took_us"]),
                          "timeouts": paused.get("stuck", 0)})
        distributed.destroy_process_group()


# --- the process that measures ----------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, float]:
    """What the programs of one run came to."""
    # Gathering and scattering have no trees.
    chosen = {"NCCL_ALGO": {"tree": "ring;allreduce:tree", "ring": "ring"}.get(options.algorithm),
              "NCCL_PROTO": {"ll": "LL", "ll128": "LL128", "simple": "Simple"}.get(options.protocol),
              "SLUICE_COLLECTIVES": "plain" if options.plain else None}
    environment = {name: value for name, value in chosen.items() if value}
    found = dict.fromkeys(COUNTED, 0)
    with Stage(options.sluice.absolute(), ROOT / "build" / "nccl_stress", environment) as stage:
        file = stage.folder / "instants"
        file.unlink(missing_ok=True)
        command = [sys.executable, Path(__file__).resolve(), "--worker", "--backend", options.backend, "--library",
                   options.pauser.absolute(), "--file", file, "--largest", options.largest,
                   *(["--plain"] if options.plain else [])]
        job = Worker(stage, "ranks", [stage.sluice, "run", "--require-pool", "--backend", options.backend, "--memory",
                                      POOL[options.backend], "--", *command])
        job.run(NONE)  # makes the communicators
        started = time.monotonic()
        programs = 0
        while time.monotonic() - started < options.seconds:
            try:
                answer = job.run((options.seed << 20) + programs + 1, PROGRAM_SECONDS)
            except Failed as failure:
                print(f"nccl_stress: {failure}", file=sys.stderr)
                found["timeouts"] += 1
                break
            programs += 1
            for name in COUNTED:
                found[name] += answer[name]
        return {**found, "checked_s": time.monotonic() - started}


def sums(cells: list[dict]) -> list[str]:
    """The runs that agree, taken together."""
    those = [cell["metrics"] for cell in cells if not cell["params"].get("plain")]
    total = {name: sum(metrics[name]["value"] for metrics in those) for name in (*COUNTED, "checked_s")}
    return [f"{len(those)} runs in all: " + ", ".join(f"{round(value)} {name}" for name, value in total.items())]


def main() -> int:
    built = ROOT / "build" / "release"
    parser = argparse.ArgumentParser(description="Collectives under random pauses.")
    parser.add_argument("--backend", choices=["auto", "host", "cuda"], default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="of programs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithm", choices=["any", "ring", "tree"], default="any")
    parser.add_argument("--protocol", choices=["any", "ll", "ll128", "simple"], default="any")
    parser.add_argument("--ranks", type=int, default=2, help="at least (default %(default)s); they share what GPUs there are")
    parser.add_argument("--largest", type=int, help="MiB that a rank gives at most; default 512, on the host 1")
    parser.add_argument("--plain", action="store_true", help="leave NCCL alone: a control, which must get stuck")
    parser.add_argument("--sluice", type=Path, default=built / "bin" / "sluice")
    parser.add_argument("--pauser", type=Path, default=built / "lib" / "libsluice_bench_pauser.so")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--library", "--file"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    clear_up_on_sigterm()
    import torch

    gpus = torch.cuda.device_count() if options.backend != "host" else 0
    options.backend = "cuda" if gpus else "host"
    options.largest = options.largest or LARGEST_MIB[options.backend]
    ranks = max(gpus, options.ranks)
    os.environ[RANKS] = str(ranks)
    found = measure(options)
    params = {"ranks": ranks, "seed": options.seed, "algorithm": options.algorithm, "protocol": options.protocol,
              "largest_mib": options.largest,
              **({"plain": True} if options.plain else {})}
    targets = {"timeouts.value": "> 0"} if options.plain else TARGETS
    cell = Cell(params, {name: single(value) for name, value in found.items()}, targets)
    write("nccl_stress", [cell], gpus=gpus, accumulate=True, summary=sums)
    return 0 if all(cell.met().values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
