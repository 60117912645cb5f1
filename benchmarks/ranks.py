"""Training jobs of several processes, a rank each: the first one starts the others and tells them what to do, or all are forked."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import fork
from overhead_models import Job, Workload

#: How many processes the first one is of.
RANKS = "SLUICE_BENCH_RANKS"
#: Of those that it has started: rank and meeting place.
OTHER = "SLUICE_BENCH_OTHER_RANK"


@contextlib.contextmanager
def all_ranks() -> Iterator["Ranks"]:
    """This process's rank and the others: starts them if this is the first, and ends with them.

    They are told through pipes: a rank that waited for a broadcast would keep its GPU busy while another job is measured.
    """
    count = int(os.environ[RANKS])
    if OTHER in os.environ:
        rank, meeting = os.environ[OTHER].split(" ", 1)
        yield Ranks(int(rank), count, meeting, [])
        return
    with tempfile.TemporaryDirectory(prefix="sluice-ranks-") as folder:
        meeting = f"file://{folder}/meeting"
        others = [subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.PIPE,
                                   env={**os.environ, OTHER: f"{rank} {meeting}"}) for rank in range(1, count)]
        for other in others:
            threading.Thread(target=_end_with, args=(other,), daemon=True).start()
        yield Ranks(0, count, meeting, others)
        for other in others:
            if other.wait(120) != 0:
                raise SystemExit(f"another rank ended with {other.returncode}")


def _end_with(other: subprocess.Popen) -> None:
    """A rank that fails leaves this one in a collective that never ends; whoever measures is to hear of it now."""
    if status := other.wait():
        print(f"another rank ended with {status}", file=sys.stderr, flush=True)
        os._exit(1)


@dataclass(frozen=True)
class Ranks:
    rank: int
    count: int
    meeting: str  # where the process group's ranks find each other
    others: list[subprocess.Popen]  # of the first only

    def messages(self) -> Iterator[str]:
        """The lines that the first rank reads from standard input, on every rank; to the end."""
        for line in sys.stdin:
            for other in self.others:
                other.stdin.write(line.encode())
                other.stdin.flush()
            yield line
        for other in self.others:
            other.stdin.close()  # they read to the end, and leave the group together

    def answer(self, of_it: dict) -> None:
        """The first rank answers for all."""
        if self.rank == 0:
            print(json.dumps(of_it), flush=True)


def forked(count: int, work: Callable[[int, str], None], together: bool = True) -> list[int]:
    """How each rank's process has ended, as os.waitpid tells; it is told its rank and where all meet. `together`: when one has
    failed, the others are ended, which would wait for it. Forked, since to import torch takes longer than most of what they do."""
    with tempfile.TemporaryDirectory(prefix="sluice-ranks-") as folder:
        ranks = [fork(functools.partial(work, rank, f"{folder}/meeting")) for rank in range(count)]
        status: dict[int, int] = {}
        while len(status) < count:
            pid, ended = os.waitpid(-1, 0)
            status[pid] = ended
            if ended and together:
                for other in set(ranks) - set(status):
                    os.kill(other, signal.SIGTERM)
        return [status[pid] for pid in ranks]


def _name_of(thread: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/self/task/{thread}/comm").read_text().rstrip("\n")
    return ""


@contextlib.contextmanager
def on_processor_of_its_own(ranks: Ranks, backend: str) -> Iterator[None]:
    """Meanwhile the calling thread has a processor to itself, and this process's others share the rest; every job's rank the
    same one. A thread beside which another one of its process runs on the same core takes half as long again for a call, and
    where threads come to lie is chance. Autograd's threads, for which the calling one waits, are with it. On the host, where
    all threads compute, and where there are few processors, nothing changes."""
    all_of_them = sorted(os.sched_getaffinity(0))
    apart = len(all_of_them) // (2 * ranks.count)  # its neighbour may be the same core's
    if backend != "cuda" or apart < 4:
        yield
        return
    own = all_of_them[2 * apart * ranks.rank]
    rest = set(all_of_them) - {at for other in range(ranks.count) for at in all_of_them[2 * apart * other:2 * apart * other + 2]}
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    with_it = {threading.get_native_id(), *(thread for thread in threads if _name_of(thread).startswith("pt_autograd"))}
    try:
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, {own} if thread in with_it else rest)
        yield
    finally:
        for thread in [0, *threads]:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, all_of_them)


@dataclass(frozen=True)
class Replica:
    """One rank of a model in DistributedDataParallel, or in shards, in a process group of its own: NCCL's on a GPU, else
    gloo's."""

    device: Any  # a torch.device
    job: Job
    model: Any
    owner: Any  # a sluice.Step, if it shares the pool
    step: Callable[[], None]
    synchronize: Callable[[], None]  # waits for what has been started


def take_gpu(rank: int, ranks: int, first: int = 0) -> Any:
    """The torch.device of a rank; current from now on. To be called before there is a communicator. `first` is the first rank's.

    Where there are fewer GPUs than ranks, they share them. NCCL refuses two ranks of a host that have one GPU; so each is told
    that it is a host of its own, and NCCL connects them by sockets. That is good for whether ranks do the right thing, not for
    how long it takes: their kernels take turns on the GPU.
    """
    import torch

    gpus = torch.cuda.device_count()
    if ranks > gpus - first:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", first + rank % (gpus - first))
    torch.cuda.set_device(device)
    return device


def meet(backend: str, ranks: Ranks) -> Any:
    """The process group of all ranks: NCCL's on GPUs, else gloo's. Returns this rank's torch.device."""
    import torch
    from torch import distributed

    cuda = backend == "cuda"
    device = take_gpu(ranks.rank, ranks.count) if cuda else torch.device("cpu")
    distributed.init_process_group("nccl" if cuda else "gloo", init_method=ranks.meeting, rank=ranks.rank,
                                   world_size=ranks.count)
    return device


def make_replica(workload: Workload, ranks: Ranks, shared: bool, adapt: bool | None = None) -> Replica:
    """`adapt`: as `sluice.Step` has it."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    cuda = workload.backend == "cuda"
    device = meet(workload.backend, ranks)
    torch.manual_seed(0)
    job = workload.make(workload.batch)

    class Loss(nn.Module):
        """The loss as a module's forward, which is what DistributedDataParallel wraps."""

        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, *batch: torch.Tensor) -> torch.Tensor:
            return job.loss(*batch)

    model = Loss()
    if not any(isinstance(param, DTensor) for param in model.parameters()):  # else it is in shards
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device] if cuda else None)
    owner = None
    if shared:
        import sluice

        owner = sluice.Step(model, job.optimizer, adapt=adapt)
        if not owner.shared:
            raise SystemExit("this process does not share the pool")

    def step() -> None:
        if owner is not None:
            owner(model, *job.batch)
        else:
            job.optimizer.zero_grad(set_to_none=True)
            model(*job.batch).backward()
            job.optimizer.step()

    return Replica(device, job, model, owner, step, torch.cuda.synchronize if cuda else lambda: None)
