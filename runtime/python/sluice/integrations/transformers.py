"""Hugging Face ``Trainer``, in one line::

    sluice.integrations.transformers.share(trainer, micro_batch=8)
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed
from transformers import Trainer

from sluice import _batches
from sluice._engine import REHEARSAL_SAMPLES, Engine, checked_micro_batch
from sluice._micro_batch import MicroBatch
from sluice._replicas import Replicas
from sluice.errors import SluiceError
from sluice.integrations.accelerate import refuse_parts


class Sharing:
    """How a ``Trainer`` runs its training steps. Made by ``share``."""

    def __init__(self, trainer: Trainer, micro_batch: int | None, adapt: bool | None, generators: Iterable[Any], recompute: Any) -> None:
        self._trainer = trainer
        self._how = (checked_micro_batch(micro_batch), adapt, list(generators), recompute)
        self._engine: Engine | None = None
        self._replicas: Replicas | None = None
        self._training_step = trainer.training_step
        self._compute_loss = trainer.compute_loss
        self._share: float | None = None
        self._divided: bool | None = None

    @property
    def shared(self) -> bool:
        """Whether this process shares the pool; False before the first step."""
        return self._engine is not None and self._engine.runtime is not None

    def stats(self) -> dict[str, float]:
        """As ``Step.stats``; a step is one call of ``training_step``. Empty before the first."""
        return self._engine.stats() if self._engine else {}

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """In place of the trainer's: its own, once for each slice of ``inputs``. Returns the batch's loss, detached."""
        accelerator = self._trainer.accelerator
        if self._engine is None:
            _check(self._trainer, model)
            self._replicas = Replicas.find(model)
            whole = model if self._replicas else accelerator.unwrap_model(model)
            self._engine = Engine(whole, self._trainer.optimizer.param_groups, *self._how, self._replicas)
        divided = self._is_divided(model, inputs, num_items_in_batch)

        def forward_backward(micro: MicroBatch) -> None:
            self._share = 1.0 if divided else micro.share
            try:
                loss = self._training_step(model, micro.slices[0], num_items_in_batch)
            finally:
                self._share = None
            micro.ran(loss)
            micro.keep(loss)

        engine = self._engine
        with engine.explained():
            losses = list(engine.run(forward_backward, (inputs,), add=True))
            if self._replicas and accelerator.sync_gradients:
                self._replicas.average(engine.gradients)
        engine.gradients.show()
        engine.make_room()
        engine.count_step((inputs,))
        return torch.stack(losses).sum()

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *rest: Any, **named: Any) -> Any:
        """In place of the trainer's: scales a mean by what the slice counts in its batch."""
        result = self._compute_loss(model, inputs, *rest, **named)
        if self._share in (None, 1.0):
            return result
        if isinstance(result, tuple):
            return (result[0] * self._share, *result[1:])
        return result * self._share

    def _is_divided(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> bool:
        """Whether the loss is a sum divided by what the whole batch counts, so that slices' losses add up as they are.

        Many models take ``num_items_in_batch`` without using it, and return a mean all the same; so the loss is asked.
        """
        said = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if said is not None:
            return said
        if num_items_in_batch is None:
            return False
        if self._divided is None:
            few = _batches.cut(inputs, 0, min(REHEARSAL_SAMPLES, _batches.size_of(inputs)))
            once, twice = (self._loss_with(model, few, count) for count in (num_items_in_batch, 2 * num_items_in_batch))
            self._divided = self._agreed(abs(twice) < 0.75 * abs(once))
        return self._divided

    def _agreed(self, answer: bool) -> bool:
        """The first process's: all of them have to do the same."""
        if self._replicas is None:
            return answer
        said = torch.tensor(float(answer), device=self._engine.gradients.params[0].device)
        distributed.broadcast(said, 0)
        return bool(said.item())

    def _loss_with(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any) -> float:
        """The loss for this count, leaving no trace."""
        trainer, engine = self._trainer, self._engine
        if self._replicas:
            model = trainer.accelerator.unwrap_model(model)
        model.train()
        with engine.leaving_no_trace(), torch.no_grad(), trainer.compute_loss_context_manager():
            return float(self._compute_loss(model, trainer._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch))


def share(trainer: Trainer, micro_batch: int | None = None, *, adapt: bool | None = None,
          generators: Iterable[Any] = (), recompute: Callable[[bool], Any] | bool | None = None) -> Sharing:
    """Lets a trainer's steps run in micro-batches that may be taken away and run again. Call it before ``train``.

    A batch of ``per_device_train_batch_size`` is sliced; gradient accumulation, clipping, mixed precision, schedules and
    callbacks stay the trainer's, and see what they would see without.

    Args:
        trainer: One device, or a process for each in ``DistributedDataParallel``, as torchrun starts them; its
            ``compute_loss`` may be overridden.
        micro_batch: Most samples in a slice. None: the whole batch.
        adapt: As for ``Step``.
        generators: As for ``Step``.
        recompute: As for ``Step``, in place of ``activation_checkpointing`` (formerly ``gradient_…``) of the trainer's arguments.

    Raises:
        TypeError: if it is not a ``transformers.Trainer``.
        ValueError: for ``recompute`` where the trainer's arguments have ``activation_checkpointing`` as well.
        SluiceError: from ``train``, if one process works on several GPUs, if several processes have parts of the model,
            or with an optimizer that runs in backward.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"share takes a transformers.Trainer, not {type(trainer).__name__}")
    if recompute and any(getattr(trainer.args, f"{name}_checkpointing", False) for name in ("activation", "gradient")):
        raise ValueError("activation_checkpointing=True computes activations again in every micro-batch, and recompute in those that need "
                         "it; give one of both")
    sharing = Sharing(trainer, micro_batch, adapt, generators, recompute)
    trainer.training_step = sharing.training_step
    trainer.compute_loss = sharing.compute_loss
    return sharing


def _check(trainer: Trainer, model: torch.nn.Module) -> None:
    if trainer.args.n_gpu > 1:
        raise SluiceError(f"this Trainer works on {trainer.args.n_gpu} GPUs in one process, and sluice shares one GPU with "
                          f"each; start it by torchrun --nproc-per-node={trainer.args.n_gpu}, or set CUDA_VISIBLE_DEVICES to "
                          "one GPU")
    refuse_parts(trainer.accelerator, model)
    if "lomo" in str(trainer.args.optim).lower():
        raise SluiceError(f"optim={trainer.args.optim} updates parameters inside of backward, which cannot run again; "
                          'use another, such as "adamw_torch"')

