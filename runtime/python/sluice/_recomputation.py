"""Activations that are kept for backward, or computed again there: the switch between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from sluice import _torch_compat
from sluice._random import RandomState
from sluice.errors import SluiceError

#: By how much what either way leaves may differ: kernels may add up in another order.
TOLERANCE = 0.05
#: Seeds of the signs by which gradients are summed up.
SEEDS = (1, 2, 3, 4)


class Recomputation:
    """Whether what runs computes its activations again. Not thread-safe.

    Args:
        switch: Called with whether it shall, outside of micro-batches, and only when that changes.
    """

    def __init__(self, switch: Callable[[bool], Any]) -> None:
        self._switch = switch
        self._on: bool | None = None  # nobody knows

    @property
    def on(self) -> bool:
        return bool(self._on)

    def set(self, on: bool) -> None:
        """Raises whatever the switch raises; it is called again then."""
        if on != self._on:
            self._on = None
            self._switch(on)
            self._on = on


def find(recompute: Any, model: nn.Module, inside: bool) -> Recomputation | None:
    """What a step was given as ``recompute``; ``inside``: whether other processes take part in the model's micro-batches.

    Raises:
        TypeError: if it is neither a function nor True, or True for a model that has no switch of its own.
        ValueError: for a model whose result depends on how often forward runs.
        SluiceError: for one whose processes would have to do the same in each micro-batch.
    """
    if recompute is None or recompute is False:
        return None
    if recompute is True:
        switch = _own_switch(model)
        if switch is None:
            raise TypeError("recompute=True needs a model with activation_checkpointing_enable and …_disable, or gradient_…, as those of "
                            f"transformers have, or set_grad_checkpointing, as those of timm; {type(model).__name__} has none of them: "
                            "give a function that is called with True where activations are to be computed again in backward, and with "
                            "False where they are to be kept")
    elif callable(recompute):
        switch = recompute
    else:
        raise TypeError(f"recompute must be a function that takes True or False, or True, not {type(recompute).__name__}")
    if inside:
        raise SluiceError("recompute is chosen by each process for itself, and what the processes of a model in shards, with tensor "
                          "parallelism or with SyncBatchNorm send in forward would be sent again by some of them: leave recompute out, "
                          "and have the model compute its activations again in every micro-batch or in none")
    if _torch_compat.has_batch_statistics(model):
        raise ValueError("recompute cannot be used with batch normalisation: forward would run twice for a micro-batch, and move the "
                         "statistics twice; leave recompute out, or use another normalisation")
    return Recomputation(switch)


def _own_switch(model: nn.Module) -> Callable[[bool], Any] | None:
    """That of a model of transformers or timm, or of one that is made alike; also of what a wrapper of torch's wraps."""
    of = getattr(model, "module", model)
    for name in ("activation", "gradient"):  # transformers has renamed it
        both = [getattr(of, f"{name}_checkpointing_{what}", None) for what in ("disable", "enable")]
        if all(map(callable, both)):
            return lambda on, both=both: both[on]()
    switch = getattr(of, "set_grad_checkpointing", None)
    return switch if callable(switch) else None


# --- whether both ways are the same training -----------------------------------------------------------------------------


class Trace:
    """What a rehearsal has left: sums of the gradients, the buffers, on the host, and random state."""

    def __init__(self, model: nn.Module, params: Iterable[nn.Parameter], random: RandomState) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self.gradients = {names.get(id(param), "a parameter"): _summed(param.grad) for param in params}
        self.buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers()}
        self.random = random.now()


@torch.no_grad()
def _summed(gradient: torch.Tensor | None) -> list[float] | None:
    """Its norm, and its sums with signs drawn at random: those of two gradients differ by as much as the gradients do."""
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).detach().flatten().float()
    sums = [flat.norm()]
    for seed in SEEDS:
        generator = torch.Generator(flat.device).manual_seed(seed)
        sums.append(torch.dot(flat, torch.empty_like(flat).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)))
    return torch.stack(sums).tolist()


def refuse_difference(kept: Trace, again: Trace, model: nn.Module) -> None:
    """Raises SluiceError if activations that are computed again do not train what kept ones do; the model is as before both."""
    without = [name for name, sums in again.gradients.items() if sums is None and kept.gradients.get(name) is not None]
    if without:
        raise SluiceError(f"recompute: {_some(without)} without a gradient where activations are computed again. torch.utils.checkpoint with "
                          "use_reentrant=True gives none where no input of a block needs one; call it with use_reentrant=False")
    drawn = [name for name, state in again.random.items() if state != kept.random.get(name)]
    if drawn:
        raise SluiceError(f"recompute: {_some(drawn)} drawn from once more where activations are computed again, so that other numbers are "
                          "used there. torch.utils.checkpoint puts back torch's default generators alone; draw from those in what is "
                          "computed again, or leave recompute out")
    now = dict(model.named_buffers())
    moved = [name for name in kept.buffers if name in again.buffers and name in now
             and _moved_otherwise(kept.buffers[name], again.buffers[name], now[name].detach().cpu())]
    if moved:
        raise SluiceError(f"recompute: {_some(moved)} changed by each forward pass, and once more where activations are computed again; "
                          "leave recompute out, or keep what changes it out of what is computed again")
    of_both = [(kept.gradients[name], sums) for name, sums in again.gradients.items() if sums and kept.gradients.get(name)]
    norm = sum(one[0] ** 2 for one, _ in of_both) ** 0.5
    apart = (sum((a - b) ** 2 for one, other in of_both for a, b in zip(one[1:], other[1:], strict=True)) / len(SEEDS)) ** 0.5
    if not apart <= TOLERANCE * norm and norm == norm:
        raise SluiceError(f"recompute: the gradients are others where activations are computed again, by {100 * apart / norm:.0f} %. What "
                          "is computed again must be what was computed first: it may not depend on random numbers of generators other "
                          "than torch's default ones, or on what changes in between")


def _moved_otherwise(kept: torch.Tensor, again: torch.Tensor, before: torch.Tensor) -> bool:
    if kept.shape != again.shape or kept.shape != before.shape or not kept.is_floating_point():
        return not torch.equal(kept, again)
    move, other = (kept.double() - before.double()).norm(), (kept.double() - again.double()).norm()
    return bool(other > TOLERANCE * move)


def _some(names: list[str]) -> str:
    return names[0] + (" is" if len(names) == 1 else f" and {len(names) - 1} more are") if names else ""
