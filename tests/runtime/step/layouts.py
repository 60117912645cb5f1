"""Models that are laid out over several processes, and how tests train them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import gloo_processes
import torch
from scripted_runtime import PatientRuntime, sharing
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sluice import _agreement

STEPS = 3
EVERY = int(os.environ.get("SLUICE_TEST_EVERY", "4"))  # one of so many operators is one that micro-batches are left at

#: Processes, and how many of them have the same samples: they have different parts of a layer.
LAYOUTS = {"shards": (2, 1), "replicas of shards": (4, 1), "tensors": (2, 2), "shards of tensors": (4, 2)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Network(nn.Module):
    """Its first and last layers are the outermost module's own, which torch leaves gathered between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def model(layout: str | None = "shards", **how) -> nn.Module:
    """None: as one process has it. `how` goes to fully_shard."""
    torch.manual_seed(0)
    module = Network().double()
    processes, copies = LAYOUTS[layout] if layout else (1, 1)
    mesh = None
    if processes > 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
    if copies > 1:
        tensors = mesh["parts"] if mesh else init_device_mesh("cpu", (copies,))
        for block in module.blocks:
            parallelize_module(block, tensors, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        mesh = mesh and mesh["data"]
    if layout and "shards" in layout:
        how = {"mesh": mesh or init_device_mesh("cpu", (distributed.get_world_size(),)), **how}
        for block in module.blocks:
            fully_shard(block, **how)
        fully_shard(module, **how)
    return module


def whole(module: nn.Module) -> list[torch.Tensor]:
    return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in module.parameters()]


def trained(module: nn.Module, part: slice, count: int, way: str = "mean", size: int | None = 2, steps: int = STEPS,
            **how) -> tuple[list[torch.Tensor], list[float]]:
    """The weights and losses of some steps on part of the samples."""
    losses = gloo_processes.losses_of(module, part, count, way, size, steps, **how)
    return [param.detach().clone() for param in whole(module)], losses


@contextlib.contextmanager
def disturbed(operator: int | None, silently: bool = False, serving: bool = True) -> Iterator[PatientRuntime]:
    """Processes need not agree on what they drop where they lose their memory at the same operator."""
    join = _agreement.join
    _agreement.join = lambda *_: None
    try:
        with sharing(PatientRuntime(operator, silently, serving=serving)) as runtime:
            yield runtime
    finally:
        _agreement.join = join
