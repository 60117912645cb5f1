"""A job of two ranks on the host, whose model is in shards: one does something that the other does not, which is what a function
of the name that --way gives does, below. It ends when both have. Each writes what has become of it to OUT.RANK.
"""

import argparse
import contextlib
import datetime
import faulthandler
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from ranks import forked  # noqa: E402

import sluice  # noqa: E402

RANKS = 2
PATIENCE_SECONDS = 200
GROUP_PATIENCE = datetime.timedelta(seconds=6)  # where a rank is stopped
SAMPLES = 6


class Training:
    """A small model of which each rank has its shards, and its step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).double()
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.step = sluice.Step(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9), micro_batch=3)
        assert self.step.shared
        self.x = torch.randn(SAMPLES, 64, dtype=torch.double, generator=torch.Generator().manual_seed(distributed.get_rank()))

    def run(self, also: Callable[[], Any] = lambda: None) -> None:
        """A step; `also` happens in each micro-batch between forward and backward."""
        def loss_of(x: torch.Tensor) -> torch.Tensor:
            out = self.model(x)
            also()
            return out.square().mean()

        self.step(loss_of, self.x)

    def weights(self) -> list[torch.Tensor]:
        return [param.full_tensor() for param in self.model.parameters()]


def once(act: Callable[[], Any]) -> Callable[[], Any]:
    """Does nothing but the second time: the first is a rehearsal, or the first slice."""
    calls: list[int] = []

    def called() -> None:
        calls.append(1)
        if len(calls) == 2:
            act()

    return called


def others_pid(rank: int) -> int:
    pids: list[Any] = [None] * RANKS
    distributed.all_gather_object(pids, os.getpid())
    return pids[1 - rank]


# --- ways ---------------------------------------------------------------------------------------------------------------------


def one_raises(training: Training, rank: int) -> None:
    """And begins another step, which the other does not."""
    training.run()
    if rank == 0:
        with contextlib.suppress(ZeroDivisionError):
            training.run(once(lambda: 1 / 0))
    training.run()


def both_raise(training: Training, _rank: int) -> None:
    training.run()
    with contextlib.suppress(ZeroDivisionError):
        training.run(once(lambda: 1 / 0))
        raise AssertionError("it has not been raised")
    training.run()
    other = Training()
    other.run()
    # The gradients of the slice before the one that has raised are gone, too.
    other.run()
    assert all(torch.equal(*pair) for pair in zip(training.weights(), other.weights(), strict=True))


def one_rehearsal_fails(training: Training, rank: int) -> None:
    def fail() -> None:
        if rank == 0 and training.step.stats()["micro_batch"] == 0:  # no slice has been cut yet
            raise RuntimeError("no room for a workspace")

    training.run(fail)


def killed(training: Training, rank: int) -> None:
    training.run()
    training.run(once(lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 1 else lambda: None)


def stopped(training: Training, rank: int) -> None:
    other = others_pid(rank)
    try:
        training.run()
        training.run(once(lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank == 1 else lambda: None)
    finally:
        os.kill(other, signal.SIGKILL)


def differ(training: Training, rank: int) -> None:
    own = torch.ones(5)
    training.run(lambda: distributed.all_reduce(own) if rank == 0 else distributed.broadcast(own, 0))


def send(training: Training, rank: int) -> None:
    own = torch.ones(5)
    training.run(lambda: distributed.send(own, 1) if rank == 0 else distributed.recv(own, 0))


def interrupted(training: Training, rank: int) -> None:
    """While the other waits for it."""
    other = others_pid(rank)

    def interrupt() -> None:
        handle = os.pidfd_open(other)
        signal.pidfd_send_signal(handle, signal.SIGINT)
        select.select([handle], [], [])

    training.run()
    training.run(once(interrupt) if rank == 1 else lambda: None)


# ------------------------------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def work(args: argparse.Namespace, rank: int, meeting: str) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=GROUP_PATIENCE if args.way == "stopped" else None, init_method=f"file://{meeting}",
                                   rank=rank, world_size=RANKS)
    training = Training()
    found = {"raised": ""}
    try:
        globals()[args.way](training, rank)
    except BaseException as why:
        found["raised"] = f"{type(why).__name__}: {why}"
    found["stats"] = training.step.stats()
    args.out.with_suffix(f".{rank}").write_text(json.dumps(found))


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    args = arguments()
    forked(RANKS, lambda rank, meeting: work(args, rank, meeting), together=False)


if __name__ == "__main__":
    main()
