"""What a step must know of an optimizer, which may be another one's wrapper and have little of what torch's have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sluice import _checks, _torch_compat
from sluice.errors import SluiceError


def checked(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer, if a step can run it.

    Raises:
        TypeError: if it is none, or does not say what parameters it has.
        ValueError: if it wraps one and scales gradients by itself.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        wraps = "; one that wraps another has to be a subclass" if hasattr(optimizer, "param_groups") else ""
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}{wraps}")
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        raise TypeError(f"{type(optimizer).__name__} has no param_groups; one that wraps another optimizer must show that one's")
    scaler = vars(optimizer).get("scaler")
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        raise ValueError(f"{type(optimizer).__name__} scales gradients by itself, as the step does: give the step the optimizer "
                         "that it wraps (optimizer.optimizer), and its scaler as scaler=")
    return optimizer


def refuse_another_models(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises ValueError if the model has something to learn, and the optimizer none of it.

    Some of its parameters may lie elsewhere, a temperature say; all of them, if the model is frozen.
    """
    own = {id(param) for param in model.parameters() if param.requires_grad}
    if own and own.isdisjoint(id(param) for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(f"the optimizer has none of the parameters of the {type(model).__name__} that the step trains: make it of "
                         "model.parameters(), after whatever replaces them (fully_shard, a new head), and freeze a model that "
                         "something else is learned through (requires_grad_(False))")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot be called without a closure; a wrapper's, if that of what it wraps cannot."""
    for each in _layers(optimizer):
        parameter = inspect.signature(each.step).parameters.get("closure")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            return True
    return False


def refuse_skipping(optimizer: torch.optim.Optimizer) -> None:
    """Raises SluiceError if it is about to leave its next step out, as accelerate's do while gradients accumulate."""
    for each in _layers(optimizer):
        if getattr(vars(each).get("gradient_state"), "sync_gradients", True) is False:
            raise SluiceError(f"{type(each).__name__} leaves this step out, since gradients are to be accumulated: leave "
                              "accelerator.accumulate out, and give the step the whole batch, which micro_batch slices; or leave "
                              "the optimizer to the accelerator (sluice.integrations.accelerate.share)")


def can_be_taken_back(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that the optimizer's step does on the host is known: it is torch's own, and nobody has hooked into it."""
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return False  # nor need it have what torch's have
    step = vars(optimizer).get("step")  # schedulers of torch's wrap it, to see that it is called
    hooks = _torch_compat.step_hooks_of(optimizer)
    if hooks is None or not set(hooks) <= {_checks.optimizer_hook}:
        return False
    return step is None or _torch_compat.is_wrapped_by_scheduler(step)


def _layers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """It, and what it wraps."""
    left, seen = [optimizer], set()
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]
