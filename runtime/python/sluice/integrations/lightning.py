"""Lightning, in one line::

    trainer = lightning.Trainer(strategy=sluice.integrations.lightning.SluiceStrategy(micro_batch=32))

and on several devices ``SluiceDDPStrategy``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from sluice import _values
from sluice._engine import Engine, checked_micro_batch
from sluice._micro_batch import MicroBatch
from sluice._replicas import Replicas
from sluice.errors import SluiceError


class _Sharing(Strategy):
    """What makes a strategy of Lightning's one that shares; to be inherited before it."""

    def _share(self, micro_batch: int | None, adapt: bool | None, generators: Iterable[Any], recompute: Any) -> None:
        self._how = (checked_micro_batch(micro_batch), adapt, list(generators), recompute)
        self._engine: Engine | None = None
        self._replicas: Replicas | None = None

    @property
    def shared(self) -> bool:
        """Whether this process shares the pool; False before the first step."""
        return self._engine is not None and self._engine.runtime is not None

    def stats(self) -> dict[str, float]:
        """As ``Step.stats``; a step is one batch. Empty before the first."""
        return self._engine.stats() if self._engine else {}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of every slice of the batch. Returns the loss that the module would have returned."""
        module = self.lightning_module
        if self._engine is None:
            self._replicas = Replicas.find(self.model)
            self._engine = Engine(self.model, self._checked_optimizer().param_groups, *self._how, self._replicas)
        engine = self._engine
        batch, rest = args[0], args[1:]
        trainer = module.trainer
        first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

        def forward_backward(micro: MicroBatch) -> None:
            with _recorded_logs(module) as logs:
                output = super(_Sharing, self).training_step(micro.slices[0], *rest, **kwargs)
                loss = _loss_of(output)
                part = loss * micro.share if micro.share != 1.0 else loss
                super(_Sharing, self).backward(part / trainer.accumulate_grad_batches, self.optimizers[0])
            more = {key: value for key, value in output.items() if key != "loss"} if isinstance(output, dict) else None
            micro.ran(part)
            micro.keep((micro.size, part.detach(), more, logs))

        with engine.explained():
            kept = list(engine.run(forward_backward, (batch,), add=not first))
            if self._replicas and not trainer.fit_loop._should_accumulate():
                self._replicas.average(engine.gradients)
        engine.count_step((batch,))
        _log_again(module, [logs for *_, logs in kept], [size for size, *_ in kept])
        loss = torch.stack([part for _, part, _, _ in kept]).sum()
        if kept[0][2] is None:
            return loss
        return {"loss": loss, **_averaged([more for _, _, more, _ in kept], [size for size, *_ in kept])}

    def backward(self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any,
                 **kwargs: Any) -> torch.Tensor:
        """Backward has run with the slices; this gives the parameters what it has brought."""
        self._engine.gradients.show()
        self._engine.make_room()
        return closure_loss

    def _checked_optimizer(self) -> torch.optim.Optimizer:
        module = self.lightning_module
        if not module.automatic_optimization:
            raise SluiceError("with manual optimization the module runs backward and optimizers itself, in one "
                              "training_step that could not run again; set automatic_optimization = True, or write the "
                              "loop with sluice.Step")
        return self.optimizers[0]


class SluiceStrategy(_Sharing, SingleDeviceStrategy):
    """Trains on one device, in micro-batches that may be taken away and run again.

    ``training_step`` is called once for each slice of the batch, and may be called again for it; so may the hooks around
    backward. The optimizer, gradient accumulation and clipping, precision, schedules and callbacks stay Lightning's, and
    see what they would see without. What ``training_step`` logs, and scalars that it returns beside the loss, are
    averaged over the batch's slices, each by its samples.

    Args:
        micro_batch: Most samples in a slice. None: the whole batch.
        adapt: As for ``Step``.
        generators: As for ``Step``.
        recompute: As for ``Step``.
        device: Where to train. None: the trainer's accelerator, its first device.
        **options: For ``SingleDeviceStrategy``: accelerator, checkpoint_io, precision_plugin.

    Raises:
        SluiceError: from ``Trainer``, for more than one device; from ``fit``, for manual optimization.
    """

    strategy_name = "sluice"

    def __init__(self, micro_batch: int | None = None, *, adapt: bool | None = None, generators: Iterable[Any] = (),
                 recompute: Callable[[bool], Any] | bool | None = None,
                 device: torch.device | str | None = None, **options: Any) -> None:
        super().__init__(device=device if device is not None else "cpu", **options)
        self._any_device = device is None
        self._devices: list[torch.device] = []
        self._share(micro_batch, adapt, generators, recompute)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The trainer's devices; set by it, before it asks for anything else."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise SluiceError(f"SluiceStrategy shares one GPU with one process, and the Trainer has {len(devices)} devices; "
                              "set devices=1, or take SluiceDDPStrategy, with a process for each")
        self._devices = devices
        if self._any_device:
            self._root_device = devices[0]


class SluiceDDPStrategy(_Sharing, DDPStrategy):
    """The same on several devices of one host, by a process for each that has a replica of the module.

    Each process runs its slices by itself; gradients are averaged once for a step of the optimizer, after the last one.

    Args:
        micro_batch: Most samples in a slice. None: the whole batch of a process.
        adapt: As for ``Step``.
        generators: As for ``Step``.
        recompute: As for ``Step``.
        **options: For ``DDPStrategy``.

    Raises:
        SluiceError: from ``fit``, for manual optimization, and for communication hooks.
    """

    strategy_name = "sluice_ddp"

    def __init__(self, micro_batch: int | None = None, *, adapt: bool | None = None, generators: Iterable[Any] = (),
                 recompute: Callable[[bool], Any] | bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._share(micro_batch, adapt, generators, recompute)


# --- what a training step says beside its loss ----------------------------------------------------------------------------


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise SluiceError("training_step must return its slice's mean loss, a scalar tensor, or a dict that has it as "
                          f"'loss', not {type(output).__name__}; to leave samples out, give them weight 0 in the loss")
    return loss


@contextlib.contextmanager
def _recorded_logs(module: LightningModule) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Holds calls of ``log`` back: those of a slice that is discarded never were, and its tensors are in the arena."""
    logs: list[tuple[str, Any, dict[str, Any]]] = []

    def log(name: str, value: Any, *more: Any, **how: Any) -> None:
        if more:
            raise TypeError("log takes its options by name: self.log(name, value, prog_bar=True)")
        if not isinstance(value, (torch.Tensor, int, float)):
            raise SluiceError(f"training_step logs {name!r} as {type(value).__name__}, whose state a discarded slice would "
                              "have changed; log tensors and numbers in it, and metrics in on_train_batch_end")
        logs.append((name, value, how))

    def log_dict(values: Any, *more: Any, **how: Any) -> None:
        for name, value in values.items():
            log(name, value, *more, **how)

    module.log, module.log_dict = log, log_dict
    try:
        yield logs
    finally:
        del module.log, module.log_dict


def _log_again(module: LightningModule, slices: list[list[tuple[str, Any, dict[str, Any]]]], sizes: list[int]) -> None:
    """Logs every name once, averaged over the slices."""
    calls: dict[str, tuple[list[Any], list[int], dict[str, Any]]] = {}
    for logs, size in zip(slices, sizes):
        for name, value, how in logs:
            values, counts, _ = calls.setdefault(name, ([], [], how))
            values.append(value)
            counts.append(size)
    for name, (values, counts, how) in calls.items():
        module.log(name, _values.mean(values, counts), **{"batch_size": sum(counts), **how})


def _averaged(outputs: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """What slices have returned: means of scalars, samples one after the other, else what the last one has returned."""
    result = {}
    for key in outputs[-1]:
        values = [output[key] for output in outputs]
        if all(map(_values.is_scalar, values)):
            result[key] = _values.mean(values, sizes)
        elif all(map(_values.has_rows, values, sizes)):
            result[key] = torch.cat(values)
        else:
            result[key] = values[-1]
    return result
