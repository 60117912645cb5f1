"""How the losses of slices add up to the loss of their batch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sluice._gradients import Gradients

REDUCTIONS = ("mean", "sum")

_OWN_NAMES = ("loss", "weight")


#: How to return more than a loss, for errors.
_BY_NAME = 'return what else is of use by name, {"loss": loss, "logits": logits}, and step.values has it'


def described(value: Any) -> str:
    """What it is, for errors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and type {value.dtype}"
    return type(value).__name__


def checked_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is one. Raises TypeError."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.dtype.is_floating_point:
        raise TypeError(f"the loss of a slice must be a scalar tensor of floating-point type, not {described(loss)}; reduce it "
                        "over the slice's samples, for example with .mean()")
    return loss


def checked_weight(weight: Any) -> float | torch.Tensor | None:
    """The weight as a number, or as a tensor if it lies on a device, where reading would wait. Raises TypeError or
    ValueError."""
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor) and weight.dim() == 0 and not weight.dtype.is_complex:
        if not weight.is_cpu:
            return weight.detach().to(torch.float32)
        weight = weight.item()
    if not isinstance(weight, numbers.Real):
        raise TypeError(f"the weight of a slice must be a number or a scalar tensor, not {described(weight)}")
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"the weight of a slice must be finite and not negative, but is {weight}")
    return float(weight)


def taken_apart(result: Any) -> tuple[Any, Any, dict[Any, Any]]:
    """What a loss function has returned: a loss, its weight or None, and what else it has given names. Raises TypeError."""
    if isinstance(result, Mapping):
        if "loss" not in result:
            raise TypeError("what the loss function returns by name must have the loss as 'loss', and has only "
                            f"{', '.join(map(repr, result)) or 'nothing'}")
        return result["loss"], result.get("weight"), {name: value for name, value in result.items() if name not in _OWN_NAMES}
    if isinstance(result, list):
        raise TypeError(f"the loss function has returned a list; return the loss, or the loss and its weight; {_BY_NAME}")
    if not isinstance(result, tuple):
        return result, None, {}
    if len(result) != 2:
        raise TypeError(f"the loss function must return a loss, or a loss and its weight, not {len(result)} values; {_BY_NAME}")
    loss, weight = result
    if isinstance(weight, (Mapping, list, tuple)) or isinstance(weight, torch.Tensor) and weight.dim() > 0:
        raise TypeError(f"the loss function has returned a loss and a {described(weight).removeprefix('a ')}: what comes second is "
                        f"the slice's weight, a number or a scalar tensor; {_BY_NAME}")
    return loss, weight, {}


class Losses:
    """The losses of one global batch.

    With the losses lᵢ of slices of nᵢ of n samples, the batch's loss is the sum of lᵢ nᵢ/n (reduction "mean") or of lᵢ
    ("sum"); with weights wᵢ that the slices bring, the sum of wᵢ lᵢ divided by the sum of wᵢ. Since that is known only
    after the last slice, backward runs on wᵢ lᵢ, and the gradients are divided once.
    """

    def __init__(self, reduction: str) -> None:
        self._reduction = reduction
        self._weighted: bool | None = None
        self._loss: torch.Tensor | None = None
        self._weight: float | torch.Tensor = 0.0
        self.samples = 0  #: of the batch

    def part(self, loss: torch.Tensor, weight: float | torch.Tensor | None, share: float) -> torch.Tensor:
        """What a slice adds to the batch's loss before it is divided; backward runs on it.

        Raises:
            ValueError: if the slice brings a weight and others do not, or the reduction is "sum".
        """
        weighted = weight is not None
        if weighted and self._reduction == "sum":
            raise ValueError('reduction="sum" adds the losses of slices as they are; weights belong to means')
        if self._weighted not in (None, weighted):
            raise ValueError("either every slice of a batch brings a weight, or none")
        self._weighted = weighted
        if weighted:
            if loss.dtype in (torch.float16, torch.bfloat16):
                loss = loss.float()  # a count of tokens may be more than these can hold
            return loss * weight
        return loss if self._reduction == "sum" or share == 1.0 else loss * share

    def state(self) -> tuple:
        """What ``add`` changes."""
        return self._loss, self._weight

    def put_back(self, state: tuple) -> None:
        """Forgets what has been added since."""
        self._loss, self._weight = state

    def add(self, part: torch.Tensor, weight: float | torch.Tensor | None) -> None:
        """A slice is committed."""
        self._loss = part if self._loss is None else self._loss + part
        if weight is not None:
            self._weight = self._weight + weight

    @property
    def is_sum(self) -> bool:
        return self._reduction == "sum"

    @property
    def by_samples(self) -> bool:
        """Whether it is a mean over samples; known when the first slice has come."""
        return not self.is_sum and not self._weighted

    @property
    def contribution(self) -> torch.Tensor:
        """The loss of this process's part of a batch that several processes have parts of, before it is divided."""
        return self._loss

    def amount(self, weight: float | torch.Tensor | None = None) -> tuple[float, float | torch.Tensor | None]:
        """For such a batch: by what to multiply this part's loss and gradients before they are added to others', and what it
        counts in their mean, None for sums. ``weight``: of a slice that has not been added yet."""
        if self._weighted:
            return 1.0, self._weight + (0.0 if weight is None else weight)
        return (1.0, None) if self.is_sum else (float(self.samples), float(self.samples))

    @property
    def divisor(self) -> float | torch.Tensor | None:
        """By what to divide the sums of the losses and of the gradients; None: by nothing."""
        if not self._weighted:
            return None
        if isinstance(self._weight, float) and self._weight == 0.0:
            raise ValueError("the weights of a batch's slices must not all be zero")
        return self._weight

    def divide(self, gradients: Gradients) -> torch.Tensor:
        """Divides the finished sums of the gradients as the loss is divided. Returns that, a scalar, detached."""
        if (divisor := self.divisor) is not None:
            gradients.divide(divisor)
        return self.result()

    def result(self) -> torch.Tensor:
        """The batch's loss, a scalar, detached."""
        divisor = self.divisor
        return self._loss if divisor is None else self._loss / divisor
