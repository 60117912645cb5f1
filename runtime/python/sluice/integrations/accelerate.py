"""Hugging Face ``accelerate``, in two lines of a loop::

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    forward_backward = sluice.integrations.accelerate.share(accelerator, model, optimizer, micro_batch=16)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from sluice import _losses
from sluice._engine import Engine, checked_micro_batch
from sluice._gradients import is_shard
from sluice._losses import Losses
from sluice._micro_batch import MicroBatch
from sluice._replicas import Replicas
from sluice._values import Values
from sluice.errors import SluiceError

REPLICATED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class Sharing:
    """Forward and backward of a loop of accelerate's, in micro-batches. Made by ``share``."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer, reduction: str,
                 how: tuple) -> None:
        self._accelerator = accelerator
        self._model = model
        self._reduction = reduction
        self._replicas = Replicas.find(model)
        whole = model if self._replicas else accelerator.unwrap_model(model)
        self._engine = Engine(whole, optimizer.param_groups, *how, self._replicas)
        self._values: dict[Any, Any] = {}
        self._weighted: bool | None = None  # whether the last batch's loss came with weights

    @property
    def shared(self) -> bool:
        """Whether this process shares the pool."""
        return self._engine.runtime is not None

    @property
    def values(self) -> dict[Any, Any]:
        """As ``Step.values``."""
        return self._values

    def stats(self) -> dict[str, float]:
        """As ``Step.stats``; a step is one batch."""
        return self._engine.stats()

    def __call__(self, loss_fn: Callable[..., Any], *batch: Any) -> torch.Tensor:
        """In place of a batch's forward pass and ``accelerator.backward``: both, once for each slice. The gradients of the
        batch are added to those that the parameters have.

        Args:
            loss_fn: As for ``Step``: called with one slice of each element of ``batch``; returns the slice's loss, the
                loss and its weight, or a mapping that has more.
            *batch: Tensors, or tuples, lists and mappings of them, with the samples in dimension 0.

        Returns:
            The loss of the batch, detached: the mean over samples, the weighted mean, or the sum.

        Raises:
            See ``Step``. After an exception no parameter has a gradient.
        """
        if not callable(loss_fn):
            raise TypeError(f"the first argument is the loss function, not {type(loss_fn).__name__}")
        engine, accelerator, losses = self._engine, self._accelerator, Losses(self._reduction)
        brought = Values(losses.is_sum)
        if accelerator.scaler is not None:  # makes its scale when it is first used: not in memory that is taken away
            accelerator.scaler.scale(torch.zeros((), device=engine.gradients.params[0].device))
        are_there = any(param.grad is not None for param in engine.gradients.params)
        apart = are_there and self._weighted is not False

        def forward_backward(micro: MicroBatch) -> None:
            loss, weight, values = _losses.taken_apart(loss_fn(*micro.slices))
            loss, weight = _losses.checked_loss(loss), _losses.checked_weight(weight)
            values = brought.checked(values, micro.size)
            if weight is not None and are_there and not apart:
                raise ValueError("either every batch between two steps of the optimizer brings a weight, or none")
            whole = micro.share == 1.0
            part = loss if whole else losses.part(loss, weight, micro.share)
            if not whole and isinstance(weight, float) and weight == 0.0:
                part = torch.zeros_like(part)  # a mean over nothing is not a number
            else:
                accelerator.backward(part)
            micro.ran(part, weight)
            micro.keep((part, values, micro.size, weight))

        with engine.explained():
            before = self._gradients() if apart else {}
            slices = list(engine.run(forward_backward, batch, add=not apart, loss_fn=loss_fn))
            for part, *kept in slices:
                losses.add(part, kept[-1])
                brought.add(*kept)
            loss = losses.contribution if len(slices) == 1 else losses.divide(engine.gradients)
            self._weighted = kept[-1] is not None
            engine.gradients.add_to_finished(before)
            if self._replicas and accelerator.sync_gradients and getattr(self._model, "require_backward_grad_sync", True):
                self._replicas.average(engine.gradients)
        engine.gradients.show()
        engine.make_room()
        engine.count_step(batch)
        self._values = brought.of_batch()
        return loss

    def _gradients(self) -> dict[int, torch.Tensor]:
        """Those of batches before, by parameter: divided by the sums of their own weights already."""
        return {id(param): param.grad.clone() for param in self._engine.gradients.params if param.grad is not None}


def share(accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer, micro_batch: int | None = None, *,
          adapt: bool | None = None, reduction: str = "mean", generators: Iterable[Any] = (),
          recompute: Callable[[bool], Any] | bool | None = None) -> Sharing:
    """What runs forward and backward of a loop's batches in micro-batches that may be taken away and run again.

    Gradient accumulation, clipping, mixed precision and its scaler, the optimizer and schedules stay accelerate's, and see
    what they would see without.

    Args:
        accelerator: One device, or a process for each in ``DistributedDataParallel``, as ``accelerate launch`` starts them.
        model: As ``prepare`` has returned it.
        optimizer: As ``prepare`` has returned it.
        micro_batch: Most samples in a slice. None: the whole batch.
        adapt: As for ``Step``.
        reduction: As for ``Step``.
        generators: As for ``Step``.
        recompute: As for ``Step``.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for one of the wrong value.
        SluiceError: for a model or optimizer that is not prepared, if one process works on several devices, if several
            processes have parts of the model, or with an optimizer that runs in backward.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"share takes an accelerate.Accelerator, not {type(accelerator).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if reduction not in _losses.REDUCTIONS:
        raise ValueError(f'reduction must be "mean" or "sum", not {reduction!r}')
    how = (checked_micro_batch(micro_batch), adapt, list(generators), recompute)
    refuse_parts(accelerator, model)
    if accelerator.has_lomo_optimizer:
        raise SluiceError("LOMO updates parameters inside of backward, which cannot run again; use another optimizer, such "
                          "as torch.optim.AdamW")
    if not isinstance(optimizer, AcceleratedOptimizer) or not getattr(model, "_is_accelerate_prepared", False):
        raise SluiceError("share takes what the accelerator has prepared: model, optimizer = accelerator.prepare(model, "
                          "optimizer)")
    return Sharing(accelerator, model, optimizer, reduction, how)


def refuse_parts(accelerator: Accelerator, model: nn.Module) -> None:
    """Raises SluiceError if processes, or devices of one, have parts of the model."""
    parts = None if accelerator.distributed_type in REPLICATED else accelerator.distributed_type.value
    if parts is None and any(map(is_shard, model.parameters())):
        parts = "fully_shard or parallelize_module"
    if parts is not None:
        raise SluiceError(f"these processes share a model by {parts}, and sluice knows replicas of it here "
                          "(DistributedDataParallel); a model that fully_shard or parallelize_module was given can be "
                          "trained by sluice.Step")
    devices = {str(device) for module in model.modules() for device in getattr(module, "hf_device_map", {}).values()}
    if len(devices) > 1:
        raise SluiceError(f"this model lies on {', '.join(sorted(devices))} (device_map), and sluice shares one device with "
                          "each process; load it onto one")
