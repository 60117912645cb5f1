"""Fully sharded training (``torch.distributed.fsdp.fully_shard``): each process has a part of every parameter."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed, nn

from sluice._gradients import Gradients
from sluice._losses import Losses
from sluice._meshes import MeshProcesses
from sluice._processes import has_common_statistics
from sluice._torch_compat import FullySharded
from sluice.errors import SluiceError


class Shards(MeshProcesses):
    """The processes of a model whose modules were given to ``fully_shard``, over a mesh of one dimension, or of several, as
    replicas of shards, or beside tensor parallelism.

    Parameters are gathered in forward and again in backward, gradients are reduced in backward, all inside of
    micro-batches; so a micro-batch counts in all processes or in none. What a process has of a gradient then adds up on
    its own.

    torch's modules remember how far a pass has come. One that was left in its middle would make the next skip what it
    takes for done, and compute with memory that has gone: ``reset`` takes that back.

    Raises:
        SluiceError: for shards over different meshes, and for a mesh of several dimensions that has not all processes.
    """

    def __init__(self, modules: list[Any]) -> None:
        self._sharded = sharded = FullySharded(modules)
        if len(sharded.meshes) != 1 or sharded.gathers_elsewhere:
            raise SluiceError("all modules of a model must be sharded over the same processes: give fully_shard the same mesh "
                              "everywhere, and a bool for reshard_after_forward")
        mesh = sharded.meshes[0]
        super().__init__([mesh, *sharded.meshes_of_parameters])
        self._count = distributed.get_world_size(self.group)
        #: Processes that have the same samples: they have different parts of the same layers.
        self._copies = self._count // mesh.size()
        self._device = sharded.device
        self.offloaded = sharded.offloaded
        self.several = self.inside = self._count > 1
        self._factor: torch.Tensor | None = None
        sharded.reshard()

    @classmethod
    def find(cls, model: nn.Module) -> Shards | None:
        """Those of a model; None if it has none."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)] if fsdp else []
        if not modules:
            return None
        shards = cls(modules)
        has_common_statistics(model, shards.group)
        return shards

    def begin_batch(self, samples: int) -> None:
        if not self._sharded.reduces_always:
            raise SluiceError("gradients of shards are added up from slice to slice already: leave "
                              "set_requires_gradient_sync, set_requires_all_reduce and set_reshard_after_backward as they are")
        if not self._sharded.ends_each_backward:
            raise SluiceError("a step's backward is complete by itself: leave set_is_last_backward, and "
                              "set_manual_backward_finalization, as they are")
        self._sharded.reshard()  # an evaluation leaves the outermost parameters gathered
        total = torch.full((), float(samples), dtype=torch.float64, device=self._device)
        distributed.all_reduce(total, group=self.group)
        self._factor = samples * self._count / total

    def scaled(self, part: torch.Tensor, losses: Losses) -> torch.Tensor:
        """torch takes the mean over processes, which may have different numbers of samples."""
        return part * self._factor.to(part.dtype) if losses.by_samples else part

    @torch.no_grad()
    def reduce(self, gradients: Gradients, losses: Losses) -> torch.Tensor:
        factor, amount = losses.amount()
        header = torch.zeros(2, dtype=torch.float64, device=self._device)
        header[0] = factor * losses.contribution
        if amount is not None:
            header[1] = amount
        distributed.all_reduce(header, group=self.group)
        loss, amount = header
        if losses.is_sum:
            gradients.divide(self._copies / self._count)
            loss = loss / self._copies
        elif not losses.by_samples:
            if amount.is_cpu and amount == 0.0:
                raise ValueError("the weights of a batch's slices must not all be zero, in all processes")
            gradients.divide(amount / self._count)
        return (loss if losses.is_sum else loss / amount).to(losses.contribution.dtype)

    def reset(self) -> None:
        super().reset()
        self._sharded.reset()
