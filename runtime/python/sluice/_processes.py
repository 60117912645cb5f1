"""What a step asks of the processes that train a model together."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

from sluice import _torch_compat
from sluice._gradients import Gradients, separate_sums
from sluice._losses import Losses
from sluice.errors import SluiceError


class Processes:
    """Several processes that train one model::

        follow ─► (begin_batch ─► (micro-batch)… ─► reduce ─► the optimizer)…

    All of them call the same functions in the same order.
    """

    #: Whether there are others than this one.
    several = True
    #: Whether they work together inside of micro-batches, in forward or backward. All keep one then, or none does.
    inside = False
    #: As torch.distributed knows them, where they do.
    group: Any = None
    #: Process groups of some of them in which they work together, too.
    groups: tuple[Any, ...] = ()
    #: Whether the model lies on the host, though it is trained on GPUs.
    offloaded = False
    #: Whether a last micro-batch that nothing can take away may have its gradients sent while backward runs: ``start``
    #: before it, ``send_rest`` and ``take`` after it.
    may_overlap = False

    def follow(self, params: list[nn.Parameter]) -> None:
        """From now on it is these parameters' gradients."""

    def room(self, params: list[nn.Parameter]) -> dict[int, torch.Tensor]:
        """Where the sums of these parameters' gradients are to lie, by ``id``: all of them, after ``follow``."""
        return separate_sums(params)

    def begin_batch(self, samples: int) -> None:
        """A global batch begins, of which this process has so many samples."""

    def communicator(self, device: torch.device) -> int:
        """The NCCL communicator of the group, as an address: made, if there is none yet, by all at the same time."""
        if found := _torch_compat.communicator_of(self.group, device):
            return found
        distributed.all_reduce(torch.zeros((), device=device), group=self.group)
        return _torch_compat.communicator_of(self.group, device)

    def begin_micro_batch(self) -> None:
        """A try at a slice begins."""

    def end_micro_batch(self) -> None:
        """And ends, whatever came of it."""

    def scaled(self, part: torch.Tensor, losses: Losses) -> torch.Tensor:
        """What backward runs on, for what a slice adds to the loss of this process's part."""
        return part

    def reset(self) -> None:
        """A try has been left in the middle of forward or backward: the next one begins as if it had not been."""

    def start(self, gradients: Gradients, losses: Losses, weight: float | torch.Tensor | None) -> None:
        raise NotImplementedError

    def send_rest(self) -> None:
        raise NotImplementedError

    def take(self, gradients: Gradients) -> None:
        raise NotImplementedError

    def reduce(self, gradients: Gradients, losses: Losses) -> torch.Tensor:
        """Makes the finished sums those of all processes, divided as the reduction says. Returns their loss, a scalar.

        Raises:
            ValueError: if the weights of all slices of all processes are zero.
        """
        raise NotImplementedError


def synchronised_norms(model: nn.Module) -> list[nn.SyncBatchNorm]:
    """Those that work together with other processes."""
    if not distributed.is_available() or not distributed.is_initialized():
        return []
    return [module for module in model.modules()
            if isinstance(module, nn.SyncBatchNorm) and distributed.get_world_size(module.process_group) > 1]


def has_common_statistics(model: nn.Module, group: Any) -> bool:
    """Whether it takes batch statistics with other processes. Raises SluiceError if some of them are not in the group."""
    norms = synchronised_norms(model)
    members = set(distributed.get_process_group_ranks(group))
    if not all(members.issuperset(distributed.get_process_group_ranks(norm.process_group)) for norm in norms):
        raise SluiceError("SyncBatchNorm works together with processes that do not train the model: all that work together inside of "
                          "a micro-batch must be in the process group of its replicas or shards")
    return bool(norms)
