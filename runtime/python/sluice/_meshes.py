"""Models that are laid out over meshes of processes, which communicate inside of forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed
from torch.utils.weak import TensorWeakRef

from sluice import _torch_compat
from sluice._processes import Processes
from sluice.errors import SluiceError

#: What the functional collectives of the micro-batch that runs have returned; None outside of one.
_begun: list[TensorWeakRef] | None = None


class MeshProcesses(Processes):
    """The processes that meshes have.

    torch keeps what a functional collective has returned, DTensor's are, until somebody waits for it. In a micro-batch that
    was left in its middle nobody may have: ``reset`` does that.

    Raises:
        SluiceError: for meshes of several dimensions, or several meshes, of which none has all processes of the job.
    """

    def __init__(self, meshes: Iterable[Any]) -> None:
        self.group, self.groups = _groups_of(list(dict.fromkeys(meshes)))
        self._begun: list[TensorWeakRef] = []
        _watch()

    def begin_micro_batch(self) -> None:
        global _begun
        self._begun = _begun = []

    def end_micro_batch(self) -> None:
        global _begun
        _begun = None

    def reset(self) -> None:
        for reference in self._begun:
            if (tensor := reference()) is not None:
                _torch_compat.wait_for_functional(tensor)
        self._begun.clear()


def _groups_of(meshes: list[Any]) -> tuple[Any, tuple[Any, ...]]:
    """The process group of all that work together, and those of some of them that this process is in."""
    groups = list(dict.fromkeys(mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)))
    if len(groups) == 1:
        return groups[0], ()
    world, most = distributed.get_world_size(), max(mesh.size() for mesh in meshes)
    if most != world:
        raise SluiceError(f"a model over several process groups must have a mesh of all {world} processes of the job, but the largest "
                          f"has {most}: micro-batches are kept by all together")
    return distributed.group.WORLD, tuple(groups)


@functools.cache
def _watch() -> None:
    _torch_compat.watch_functional_collectives(_note)


def _note(tensor: torch.Tensor) -> None:
    if _begun is not None:
        _begun.append(TensorWeakRef(tensor))
