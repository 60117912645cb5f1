"""What cannot be trained in micro-batches that may run again, and says so before it does harm."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sluice import _torch_compat
from sluice._processes import synchronised_norms
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from sluice._micro_batch import MicroBatch
    from sluice._processes import Processes

#: The micro-batches that run at this moment, of all threads. Appended to and removed from under the interpreter's lock.
running: list[MicroBatch] = []


def refuse_parallel(model: nn.Module, processes: Processes | None) -> None:
    """Raises SluiceError for modules whose work on other devices or in other processes cannot run again. ``processes``: those
    that train the model, and whose work can."""
    if processes is not None and processes.offloaded:
        raise SluiceError("shards that lie on the host are not shared memory of the GPU: leave CPUOffloadPolicy out; under "
                          "`sluice run` memory goes only while somebody else needs it")
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise SluiceError("nn.DataParallel works on several GPUs at once, of which sluice shares one a process; pass "
                              "the module inside of it (model.module), or list one GPU in device_ids")
        if _reduces_inside(module, processes) and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise SluiceError(
                f"{type(module).__name__} reduces gradients inside of backward, and a micro-batch that runs again would "
                "wait for processes that do not run theirs; pass the module inside of it (model.module) and reduce the "
                "gradients in a hook of the optimizer (register_step_pre_hook), or train in one process")
    if processes is None and synchronised_norms(model):
        raise SluiceError("SyncBatchNorm works together with other processes inside of forward, and a micro-batch that "
                          "runs again would wait for them; put the model into DistributedDataParallel, whose processes "
                          "keep the same micro-batches then")


def refuse_lazy(model: nn.Module) -> None:
    """Raises SluiceError for parameters and buffers that have no shape yet."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, tensor in named if nn.parameter.is_lazy(tensor)]:
        raise SluiceError(f"{lazy[0]} of the model is not initialized yet, as lazy layers are before they have seen a tensor: run the "
                          "model once, and make its optimizer and its step after that")


def _reduces_inside(module: nn.Module, processes: Processes | None) -> bool:
    """Whether it reduces gradients by itself, and nobody sees to it that it can run again."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = () if processes is not None else (nn.parallel.DistributedDataParallel, *((fsdp.FSDPModule,) if fsdp else ()))
    return isinstance(module, (*kinds, *((fsdp.FullyShardedDataParallel,) if fsdp else ())))


def collectives_are_plain() -> SluiceError:
    """For ranks on GPUs that cannot agree on what they send each other."""
    return SluiceError("training in several processes on GPUs needs libsluice_nccl.so, which lets them agree on each collective "
                       "and is not in this process; leave LD_PRELOAD as `sluice run` sets it, and SLUICE_COLLECTIVES unset")


def ranks_do_not_agree() -> SluiceError:
    """For ranks that would have to keep the same micro-batches."""
    return SluiceError("processes that work together inside of micro-batches must agree on which they keep, and these do not; why, "
                       "the first of them has said on standard error when their communicator was made")


def refuse_recorded_graphs(device: int) -> None:
    """Raises SluiceError if torch.compile replays CUDA graphs, whose memory is the same in every run."""
    if _torch_compat.has_recorded_graphs(device):
        raise SluiceError(
            "torch.compile has recorded CUDA graphs, which replay on fixed addresses, also after their memory was taken "
            'away; compile with mode="default", or with mode="max-autotune-no-cudagraphs"')


def _refuse_optimizer_inside(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not running:
        return
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for micro in running:
        if micro.thread == threading.get_ident() or not params.isdisjoint(map(id, micro.params)):
            raise SluiceError(
                f"{type(optimizer).__name__}.step was called inside of a micro-batch, whose work may be thrown away and "
                "run again; take it out of the loss function and of hooks that run in backward "
                "(register_post_accumulate_grad_hook): the step runs the optimizer after the last slice")


#: Called before every step of every optimizer.
optimizer_hook = _refuse_optimizer_inside
register_optimizer_step_pre_hook(optimizer_hook)
