"""What slices bring beside their losses, put together to what their batch has: each sample counts once."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from sluice import _losses


class Values:
    """Of one global batch, by name.

        (checked ─► add)… ─► of_batch

    Args:
        is_sum: Whether losses are sums.
    """

    def __init__(self, is_sum: bool) -> None:
        self._is_sum = is_sum
        self._slices: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        self._weights: list[Any] = []

    def checked(self, values: Mapping[Any, Any], samples: int) -> dict[Any, Any]:
        """The values of a slice of so many samples, detached.

        Raises:
            TypeError: for one that cannot be put together with those of other slices.
            ValueError: if other slices have brought others.
        """
        for name, value in values.items():
            if not is_scalar(value) and not has_rows(value, samples):
                raise TypeError(f"the loss function returns {name!r} as {_losses.described(value)}; beside the loss it may return "
                                f"numbers, scalar tensors, and tensors with one row for each of the slice's {samples} samples. "
                                "What else is needed is best computed from those, outside of the step")
        if self._slices:
            _refuse_others(values, self._slices[0])
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    def add(self, values: dict[Any, Any], samples: int, weight: Any) -> None:
        """A slice is committed; ``weight``: None if it counts by samples."""
        self._slices.append(values)
        self._sizes.append(samples)
        self._weights.append(weight)

    def of_batch(self) -> dict[Any, Any]:
        """Rows one after the other, and scalars as the loss adds up."""
        amounts = self._sizes
        if any(weight is not None for weight in self._weights):
            amounts = list(map(_losses.checked_weight, self._weights))
        result = {}
        for name in self._slices[0]:
            each = [values[name] for values in self._slices]
            if len(each) == 1:
                result[name] = each[0]
            elif not is_scalar(each[0]):
                result[name] = torch.cat(each)
            else:
                result[name] = sum(each) if self._is_sum else mean(each, amounts)
        return result


def is_scalar(value: Any) -> bool:
    """Whether it is a number, or a tensor of one without dimensions."""
    return value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, numbers.Real)


def has_rows(value: Any, samples: int) -> bool:
    """Whether it is a tensor with one row for each of so many samples."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == samples


def mean(values: list[Any], amounts: list[Any]) -> Any:
    """Of numbers and scalar tensors, by what each counts: a number, or a scalar tensor on a device. One that counts nothing is
    left out, even if it is no number; one alone stays as it is."""
    if len(values) == 1:
        return values[0]
    whole = sum(amounts)
    return sum(_part(value, amount / whole) for value, amount in zip(values, amounts, strict=True))


def _part(value: Any, share: Any) -> Any:
    if isinstance(share, torch.Tensor):  # to read it would wait for the device
        return torch.where(share == 0, torch.zeros_like(share), value * share)
    return value * share if share != 0 else 0.0


def _refuse_others(values: Mapping[Any, Any], first: dict[Any, Any]) -> None:
    for name in (*values, *first):
        if name not in values or name not in first:
            raise ValueError(f"the loss function has returned {name!r} with some slices alone; what it returns beside the loss it "
                             "must return with every slice")
        one, other = _form(first[name]), _form(values[name])
        if one != other:
            raise ValueError(f"{name!r} is {one} for one slice, and {other} for another; the loss function must return the same "
                             "with every slice, of however many samples")


def _form(value: Any) -> str:
    return "a number" if is_scalar(value) else f"a row of shape {list(value.shape[1:])} for each sample"
