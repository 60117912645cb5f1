"""Functions of a test that several processes run, which gloo connects; and what their models are trained on."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn

import sluice

#: After so long every process says where it is, and ends.
PATIENCE_SECONDS = 160


def run(folder: Path, bodies: tuple[Callable[[int], None], ...], ranks: int) -> None:
    """Runs the functions, one after the other, with the rank of each process. Raises what one of them raises."""
    of_this_test = dict(os.environ)  # the fork server has that of its own start
    multiprocessing.start_processes(_process, (folder, bodies, ranks, of_this_test), nprocs=ranks, start_method="forkserver")


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of four numbers, their classes of three, and their weights."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(count, 4, dtype=torch.double, generator=generator), torch.randint(3, (count,), generator=generator),
            torch.rand(count, dtype=torch.double, generator=generator))


def losses_of(module: nn.Module, part: slice, count: int, way: str, size: int | None, steps: int, **how: Any) -> list[float]:
    """Trains some steps on part of the samples, in slices of that size. `way`: "mean", "weights" or "sum"."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    step = sluice.Step(module, optimizer, size, reduction="sum" if way == "sum" else "mean", **how)

    def loss_of(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
        each = nn.functional.cross_entropy(module(x), y, reduction="none")
        if way == "weights":
            return (each * weight).sum() / weight.sum(), weight.sum()
        return each.sum() if way == "sum" else each.mean()

    return [float(step(loss_of, *(of[part] for of in samples(count)))) for _ in range(steps)]


def expect_same_on_all(tensor: torch.Tensor) -> None:
    """To be called by all ranks: each has the same bits."""
    others = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(others, tensor)
    assert all(torch.equal(other, tensor) for other in others)


def names(bodies: tuple[Callable[[int], None], ...]) -> str:
    return " ".join(body.__name__ for body in bodies)


def _process(rank: int, folder: Path, bodies: tuple[Callable[[int], None], ...], ranks: int, environment: dict[str, str]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    os.environ.clear()
    os.environ |= environment
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    for body in bodies:
        body(rank)
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads are at times not joined when Python ends, which aborts the process
