"""Data-parallel training: replicas of a model in several processes, whose gradients are added up once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import distributed, nn

from sluice._gradients import Gradients
from sluice._losses import Losses
from sluice.errors import SluiceError

#: Gradients are reduced in pieces of so many bytes, as DistributedDataParallel does; two of them exist at a time.
BUCKET_BYTES = 25 << 20

#: Whether a wrapper with a static graph takes its first reduction for begun.
_HAS_REDUCED = "_static_graph_delay_allreduce_enqueued"


class Replicas:
    """The processes of a model in ``DistributedDataParallel``.

    Each process runs its slices for itself, as often as it has to; none of them waits for another inside of a micro-batch.
    After the last one their gradients are added up, outside the arena, as if one process had had all the samples::

        begin_batch ─► (micro-batch, `apart`)… ─► reduce ─► the optimizer

    Raises:
        SluiceError: for wrappers in different process groups, and for settings that change what is reduced.
    """

    def __init__(self, wrappers: list[nn.parallel.DistributedDataParallel]) -> None:
        self._wrappers = wrappers
        self._group = wrappers[0].process_group
        self._stack = contextlib.ExitStack()
        for each in wrappers:
            if each.process_group != self._group:
                raise SluiceError("the DistributedDataParallel modules of one model must have the same process group")
            if each._comm_hooks:
                raise SluiceError("a communication hook of DistributedDataParallel would not be called: gradients are reduced "
                                  "once a step, after the last micro-batch; leave register_comm_hook out")
            if each.mixed_precision is not None or each._delay_all_reduce_params:
                raise SluiceError("DistributedDataParallel's mixed_precision and delay_all_reduce_named_params reduce "
                                  "gradients inside of backward; leave them out, and use torch.autocast")

    @classmethod
    def find(cls, model: nn.Module) -> Replicas | None:
        """Those of a model; None if it trains in one process."""
        if not distributed.is_available() or not distributed.is_initialized():
            return None
        wrappers = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
        several = any(distributed.get_world_size(each.process_group) > 1 for each in wrappers)
        return cls(wrappers) if several else None

    def begin_batch(self) -> None:
        """Gives every process the buffers of the first, if that was asked for."""
        for each in self._wrappers:
            if each.broadcast_buffers and each.modules_buffers:
                each._sync_buffers()

    def begin_micro_batch(self) -> None:
        """Until ``end_micro_batch`` the wrappers leave buffers and gradients to themselves."""
        for each in self._wrappers:
            self._stack.enter_context(each.no_sync())
            each.require_forward_param_sync = False
            if each.static_graph:  # then the first backward reduces even so, unless that was done
                self._stack.callback(setattr, each, _HAS_REDUCED, getattr(each, _HAS_REDUCED))
                setattr(each, _HAS_REDUCED, True)

    def end_micro_batch(self) -> None:
        self._stack.close()
        for each in self._wrappers:
            each.require_forward_param_sync = True  # whoever evaluates next does it with equal buffers

    @torch.no_grad()
    def reduce(self, gradients: Gradients, losses: Losses) -> torch.Tensor:
        """Makes the finished sums those of all processes, divided as the reduction says. Returns their loss, a scalar.

        A parameter that some process has no gradient of counts as zero there; one that none has gets none.

        Raises:
            ValueError: if the weights of all slices of all processes are zero.
        """
        finished = gradients.finished
        mine = {id(param) for each in self._wrappers for name, param in each.module.named_parameters()
                if name not in each.parameters_to_ignore}
        params = [param for param in gradients.params if id(param) in mine]
        factor, amount, loss = losses.contribution()
        device = params[0].device
        header = torch.zeros(2 + len(params), dtype=torch.float64, device=device)
        header[0], header[1] = amount, factor * loss
        used = torch.tensor([param in finished for param in params], dtype=torch.float64)
        header[2:] = used.to(device)
        distributed.all_reduce(header, group=self._group)
        divisor = 1.0 if losses.is_sum else header[0]
        if not losses.is_sum and header.is_cpu and header[0] == 0.0:
            raise ValueError("the weights of a batch's slices must not all be zero, in all processes")
        scale = factor / divisor
        for param in params:
            if param not in finished:
                finished[param] = gradients.zero_of(param)
        self._reduce([finished[param] for param in params], scale)
        if not bool(used.all()):  # others may have what is missing here
            for param, count in zip(params, header[2:].tolist(), strict=True):
                if count == 0.0:
                    del finished[param]
        return (header[1] / divisor).to(loss.dtype)

    def _reduce(self, sums: list[torch.Tensor], scale: float | torch.Tensor) -> None:
        pending: list[tuple[distributed.Work, torch.Tensor, list[torch.Tensor]]] = []
        for bucket in _buckets(sums):
            flat = torch.cat([each.reshape(-1) for each in bucket])
            flat.mul_(scale)
            pending.append((distributed.all_reduce(flat, group=self._group, async_op=True), flat, bucket))
            if len(pending) > 1:
                _take(*pending.pop(0))
        for each in pending:
            _take(*each)


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one type and device together, in their order."""
    open_ones: dict[tuple, list[torch.Tensor]] = {}
    filled: dict[tuple, int] = {}
    for each in tensors:
        kind = (each.dtype, each.device)
        open_ones.setdefault(kind, []).append(each)
        filled[kind] = filled.get(kind, 0) + each.nbytes
        if filled[kind] >= BUCKET_BYTES:
            del filled[kind]
            yield open_ones.pop(kind)
    yield from open_ones.values()


def _take(work: distributed.Work, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    work.wait()
    parts = flat.split([each.numel() for each in bucket])
    torch._foreach_copy_(bucket, [part.view_as(each) for part, each in zip(parts, bucket, strict=True)])
