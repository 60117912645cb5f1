"""Tensor parallelism alone: each process has a part of some layers, and all are given the same samples."""

from __future__ import annotations

import sys

import torch
from torch import nn

from sluice._gradients import Gradients, is_shard
from sluice._losses import Losses
from sluice._meshes import MeshProcesses
from sluice._processes import has_common_statistics


class TensorParallel(MeshProcesses):
    """The processes of a model whose parameters are in parts (``parallelize_module``, ``distribute_module``), without shards of
    the data.

    Activations are sent in forward and in backward; so a micro-batch counts in all processes or in none. All compute the
    same loss, and gradients of the parts they have.
    """

    inside = True

    @classmethod
    def find(cls, model: nn.Module) -> TensorParallel | None:
        """Those of a model; None if it has none. Not to be asked of one in shards."""
        if "torch.distributed.tensor" not in sys.modules:
            return None
        meshes = [param.device_mesh for param in model.parameters() if is_shard(param) and param.device_mesh.size() > 1]
        if not meshes:
            return None
        found = cls(meshes)
        has_common_statistics(model, found.group)
        return found

    def reduce(self, gradients: Gradients, losses: Losses) -> torch.Tensor:
        return losses.divide(gradients)
