"""The training step: one optimizer step over a global batch, in micro-batches that may be taken away and run again."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sluice import _batches, _checks, _losses, _optimizers
from sluice._engine import OPTIMIZER_WARM_UP_STEPS, Engine
from sluice._gradients import is_shard
from sluice._losses import Losses
from sluice._micro_batch import MicroBatch
from sluice._processes import Processes
from sluice._replicas import Replicas
from sluice._shards import Shards
from sluice._tensor_parallel import TensorParallel
from sluice._update import Update
from sluice._values import Values
from sluice.balance import BalancedBatchSampler
from sluice.errors import SluiceError


class Step:
    """Owns the body of a training loop.

    Every call slices the global batch along dimension 0, runs forward and backward for each slice with the loss scaled
    by its share, adds the gradients to accumulators outside the arena in one protected commit, and runs the optimizer
    once. A slice whose memory was taken by the inference server counts for nothing and runs again: random state and
    changed buffers are restored first, so with the same slicing and deterministic kernels training is bit-equal to a
    run that was never disturbed. The loss function may therefore run more than once.

    Not under ``sluice run``, the same arithmetic runs in plain PyTorch.

    Args:
        model: Module whose parameters are trained.
        optimizer: Any optimizer over parameters of ``model``, and perhaps of others; also one that wraps another.
        micro_batch: Most samples in a slice. None: the whole batch.
        adapt: Whether a slice may become smaller when memory is short. None: unless the model has batch statistics,
            whose result depends on the slicing, or is in shards, whose processes have as many slices each. If not, training
            waits until a whole slice fits.
        reduction: "mean" if the loss of a slice is a mean, over samples or over a weight that comes with it; "sum" if it
            is a sum over samples.
        generators: Random generators that the loss function uses besides the default ones of torch, Python and NumPy:
            ``random.Random``, ``numpy.random.Generator``, ``numpy.random.RandomState``, ``torch.Generator``.
        scaler: Scales the loss for backward; gradients are unscaled before they are clipped, the optimizer is left out
            where one is not finite, and the scale is updated once a step.
        clip_norm: Largest norm of the optimizer's gradients, all taken as one vector.
        closure: Whether the optimizer calls a closure for the loss, as LBFGS does. None: if its ``step`` cannot be
            called without one.
        recompute: Switches activation checkpointing: a function that is called with whether activations are to be computed
            again in backward, between micro-batches; True: the model's own switch (transformers, timm). They are where memory
            is short and more samples a second are trained so.
        balance: What deals the batches to the processes of a model in ``DistributedDataParallel``: it is told what each step's
            micro-batches have taken here.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for one of the wrong value.
        SluiceError: under ``sluice run`` for a model whose work on several GPUs, or in several processes, cannot run again; for
            ``recompute`` or ``balance`` with processes that work together inside of micro-batches; for ``balance`` among other
            processes than train the model.

    Not thread-safe: one step at a time, from one thread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batch: int | None = None,
        *,
        adapt: bool | None = None,
        reduction: str = "mean",
        generators: Iterable[Any] = (),
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
        closure: bool | None = None,
        recompute: Callable[[bool], Any] | bool | None = None,
        balance: BalancedBatchSampler | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        _optimizers.checked(optimizer)
        if reduction not in _losses.REDUCTIONS:
            raise ValueError(f'reduction must be "mean" or "sum", not {reduction!r}')
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
        if balance is not None and not isinstance(balance, BalancedBatchSampler):
            raise TypeError(f"balance must be a sluice.BalancedBatchSampler, not {type(balance).__name__}")
        _checks.refuse_lazy(model)
        _optimizers.refuse_another_models(optimizer, model)
        self._needs_closure = _optimizers.needs_closure(optimizer) if closure is None else closure
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self._scaler and self._needs_closure:
            raise ValueError("a gradient scaler cannot be used with an optimizer that calls a closure: the scale would "
                             "change between its calls; train in bfloat16 or float32, which need none")
        self._clip_norm = _checked_clip_norm(clip_norm)
        self._reduction = reduction
        self.model = model
        self.optimizer = optimizer
        processes = _processes_of(model)
        if balance is not None:
            balance.follow(processes)
        self._balance = balance
        self._engine = Engine(model, optimizer.param_groups, micro_batch, adapt, generators, recompute, processes)
        self._runtime = self._engine.runtime
        self._arena = self._engine.arena
        self._loss: torch.Tensor | None = None
        self._grad_norm: torch.Tensor | None = None
        self._values: dict[Any, Any] = {}

    @property
    def shared(self) -> bool:
        """Whether this process shares the pool."""
        return self._runtime is not None

    @property
    def loss(self) -> torch.Tensor | None:
        """The last step's loss, a scalar, detached; None before the first."""
        return self._loss

    @property
    def values(self) -> dict[Any, Any]:
        """What the last call's loss function has returned beside its loss, by name, for the whole batch of this process: each
        sample counts once, however often its slice has run. Tensors with one row a sample are joined, in the batch's order;
        numbers and scalar tensors add up as losses do: by samples, by weight, or, with ``reduction="sum"``, as they are.
        Detached; empty if it has returned nothing else."""
        return self._values

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the last step's gradients before they were clipped, a scalar; None without ``clip_norm``. The optimizer's hooks
        find that of the gradients that it is given."""
        return self._grad_norm

    def stats(self) -> dict[str, float]:
        """Counts since the start: steps, samples, commits, discards, the last micro_batch; wait_seconds for memory; and
        discarded_seconds, which micro-batches of this process had run when they lost their memory; recomputed, the commits whose
        activations were computed again in backward."""
        return self._engine.stats()

    def __call__(self, loss_fn: Callable[..., Any], *batch: Any) -> torch.Tensor:
        """Trains on one global batch.

        Args:
            loss_fn: Called with one slice of each element of ``batch``; returns the slice's loss, a scalar, or the loss
                and its weight, a number or a scalar tensor, not negative; or a mapping that has the loss as "loss", if need
                be its weight as "weight", and under other names what ``values`` is to have: numbers, scalar tensors, and
                tensors with one row for each of the slice's samples.
            *batch: Tensors and NumPy arrays with the samples in dimension 0, lists with an element for each, and tuples, lists
                and mappings of those. Numbers, strings and scalar tensors go to every slice.

        Returns:
            The loss of the global batch, detached: the mean over samples, the weighted mean, or the sum. If the
            optimizer calls a closure, what the first call has computed.

        Raises:
            OutOfMemory: if the smallest permitted slice can never fit.
            Survivors: if ``loss_fn`` keeps tensors beyond its run and they were taken away.
            SluiceError: if an optimizer runs inside of ``loss_fn`` or backward, or backward inside of ``loss_fn`` for the loss
                that it returns; if what it changes outside of the model cannot be put back.
            TypeError: if ``loss_fn`` returns something else, or the batch has something that cannot be cut.
            ValueError: if the batch has no sample, or its elements disagree about how many; for weights that are negative,
                not finite, all zero, or only there for some slices, and so for values.
            torch.OutOfMemoryError: from ``loss_fn`` or the optimizer, outside the arena; the message says who holds the
                pool's memory.
            Exception: whatever ``loss_fn`` itself raises; the step has then not happened.
        """
        if not callable(loss_fn):
            raise TypeError(f"the first argument of a step is the loss function, not {type(loss_fn).__name__}")
        self._begin_measuring()
        with self._engine.explained():
            if self._needs_closure:
                return self._step_with_closure(loss_fn, batch)
            losses = self._begin()
            update = self._early_update(losses)
            brought = self._accumulate(loss_fn, batch, losses, update)
            ahead = update is not None and update.has_run
            return self._finish(batch, update.loss if ahead else self._apply(losses), brought.of_batch())

    def micro_batches(self, *batch: Any) -> Iterator[MicroBatch]:
        """The same for a loop that is written by hand; when it is over, the optimizer has run::

            for micro in step.micro_batches(x, y):
                with micro as (x, y):
                    micro.backward(F.cross_entropy(model(x), y))

        Each ``with`` is one try at a slice. If its memory is taken away it ends early, without an exception, and another
        try at the slice follows; so everything that belongs to a slice stands in the block. ``micro.committed`` tells
        afterwards whether the try counts. A loop that is left early has not trained.

        Raises:
            ValueError: if the optimizer calls a closure; else see ``__call__``.
        """
        if self._needs_closure:
            raise ValueError(f"{type(self.optimizer).__name__} calls a closure, which runs the micro-batches several times: "
                             "give the loss function to the step instead, step(loss_fn, x, y)")
        return self._micro_batches(batch)

    def _micro_batches(self, batch: tuple) -> Iterator[MicroBatch]:
        self._begin_measuring()
        losses = self._begin()
        tries = self._engine.micro_batches(batch, losses, self._scaler, lazily=True)
        while True:
            with self._engine.explained():
                micro = next(tries, None)
            if micro is None:
                break
            yield micro
        with self._engine.explained():
            self._finish(batch, self._apply(losses), {})

    # --- the parts of a step -------------------------------------------------------------------------------------------

    def _begin_measuring(self) -> None:
        """What a step that has failed has taken does not count."""
        if self._balance is not None:
            self._engine.stopwatch.take()
            self._engine.stopwatch.is_on = self._balance.is_measured

    def _begin(self) -> Losses:
        _optimizers.refuse_skipping(self.optimizer)
        if self._scaler:
            # The scale is a tensor that the scaler makes when it first scales: not in memory that is taken away. From
            # here to the optimizer it is only read.
            self._scaler.scale(torch.zeros((), device=self._engine.gradients.params[0].device))
        return Losses(self._reduction)

    def _early_update(self, losses: Losses) -> Update | None:
        """What the last micro-batch may run before it is known to count. The first steps make the optimizer's state. Replicas'
        gradients have been sent by then, and left where autograd puts them."""
        processes = self._engine.processes
        if (self._scaler or not self.shared or (processes is not None and not processes.inside)
                or self._engine.counts["steps"] < OPTIMIZER_WARM_UP_STEPS or not _optimizers.can_be_taken_back(self.optimizer)):
            return None

        norm = self._grad_norm

        def body() -> torch.Tensor:
            self._engine.gradients.finish(show_follows=True)
            return self._apply(losses)

        def take_back() -> None:
            self._grad_norm = norm

        return Update(self.optimizer, body, take_back)

    def _accumulate(self, loss_fn: Callable[..., Any], batch: tuple, losses: Losses, update: Update | None = None) -> Values:
        """Runs all micro-batches. Returns what the loss function has returned beside their losses."""
        brought = Values(losses.is_sum)

        def forward_backward(micro: MicroBatch) -> None:
            loss, weight, values = _losses.taken_apart(loss_fn(*micro.slices))
            values = brought.checked(values, micro.size)
            micro.backward(loss, weight)
            micro.keep((values, micro.size, weight))

        for kept in self._engine.run(forward_backward, batch, losses=losses, scaler=self._scaler, update=update, lazily=True,
                                     loss_fn=loss_fn):
            brought.add(*kept)
        return brought

    def _show_gradients(self, losses: Losses) -> torch.Tensor:
        """Gives the parameters the gradients of the batch. Returns its loss."""
        gradients, processes = self._engine.gradients, self._engine.processes
        if processes is not None:
            with self._engine.asking(inside=False):
                loss = processes.reduce(gradients, losses)
        else:
            loss = losses.divide(gradients)
        gradients.show()
        self._engine.make_room()
        return loss

    def _clip(self) -> None:
        if self._clip_norm is not None:
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(params, self._clip_norm)
            self._grad_norm = norm.full_tensor() if is_shard(norm) else norm

    def _apply(self, losses: Losses) -> torch.Tensor:
        """Runs the optimizer on the gradients of the batch. Returns its loss."""
        loss = self._show_gradients(losses)
        if self._scaler:
            self._scaler.unscale_(self.optimizer)
        self._clip()
        if self._scaler:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()
        self._engine.gradients.clear()
        return loss

    def _finish(self, batch: tuple, loss: torch.Tensor, values: dict[Any, Any]) -> torch.Tensor:
        self._loss, self._values = loss, values
        self._engine.count_step(batch)
        if self._balance is not None:
            self._balance.stepped(_batches.size_of(batch), self._engine.stopwatch.take())
        return loss

    def _step_with_closure(self, loss_fn: Callable[..., Any], batch: tuple) -> torch.Tensor:
        first: list[tuple[torch.Tensor, dict[Any, Any]]] = []

        def closure() -> torch.Tensor:
            with torch.enable_grad():
                losses = self._begin()
                brought = self._accumulate(loss_fn, batch, losses)
            loss = self._show_gradients(losses)
            self._clip()
            if not first:
                first.append((loss, brought.of_batch()))
            return loss

        self.optimizer.step(closure)
        self._engine.gradients.clear()
        if not first:
            raise ValueError(f"{type(self.optimizer).__name__} has not called its closure; leave closure=True out")
        return self._finish(batch, *first[0])


def _processes_of(model: nn.Module) -> Processes | None:
    """Those that train it together. Raises SluiceError if they are of two kinds."""
    replicas, shards = Replicas.find(model), Shards.find(model)
    if replicas is not None and shards is not None:
        raise SluiceError("a model can be in DistributedDataParallel or sharded by fully_shard, not both")
    if shards is not None:
        return shards
    parts = TensorParallel.find(model)
    if replicas is not None and parts is not None:
        raise SluiceError("a model can be in DistributedDataParallel or have layers in parts, not both; beside those, "
                          "fully_shard trains replicas and shards")
    return replicas if replicas is not None else parts


def _checked_clip_norm(clip_norm: Any) -> float | None:
    if clip_norm is None:
        return None
    if not isinstance(clip_norm, numbers.Real) or isinstance(clip_norm, bool):
        raise TypeError(f"clip_norm must be a number, not {type(clip_norm).__name__}")
    if not clip_norm > 0 or math.isnan(clip_norm):
        raise ValueError(f"clip_norm must be more than 0, not {clip_norm}")
    return float(clip_norm)
