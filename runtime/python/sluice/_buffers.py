"""The buffers of a model, which forward may change: kept before a micro-batch, put back if it is discarded."""

from __future__ import annotations

import torch
from torch import nn


class Buffers:
    """Copies of a model's buffers, in memory that is not given away.

    Values are compared with nothing: batch normalisation changes its running statistics without raising a tensor's
    version, so only copying them back is exact.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def save(self) -> None:
        """Remembers every buffer and its values."""
        self._places = [(module, name, buffer) for module in self._model.modules()
                        for name, buffer in module._buffers.items() if buffer is not None]
        if not self._fit():
            self._copies = [torch.empty_like(buffer) for _, _, buffer in self._places]
        _copy(self._copies, [buffer for _, _, buffer in self._places])

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what was remembered: the same tensors, with the values that they had."""
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
        _copy([buffer for _, _, buffer in self._places], self._copies)

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the tensors by which forward has replaced buffers out of the arena."""
        for module, name, buffer in self._places:
            now = module._buffers.get(name)
            if now is not None and now is not buffer:
                module._buffers[name] = now.detach().clone()

    def _fit(self) -> bool:
        return len(self._copies) == len(self._places) and all(
            copy.shape == buffer.shape and copy.dtype == buffer.dtype and copy.device == buffer.device
            for copy, (_, _, buffer) in zip(self._copies, self._places))


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies in one launch for all tensors of a type, where torch can."""
    kinds: dict[tuple, tuple[list, list]] = {}
    for to, value in zip(into, values):
        group = kinds.setdefault((to.device, to.dtype), ([], []))
        group[0].append(to)
        group[1].append(value)
    for group in kinds.values():
        torch._foreach_copy_(*group)
