"""What forward may change in a model, its buffers and other tensors: kept before a micro-batch, put back if it is discarded."""

from __future__ import annotations

import torch
from torch import nn

from sluice import _torch_compat
from sluice._modules import Parts, are_same
from sluice._torch_compat import buffers_of


class Buffers:
    """Copies of a model's buffers, in memory that is not given away.

    Values are compared with nothing: batch normalisation changes its running statistics without raising a tensor's
    version, so only copying them back is exact.

    Tensors that are plain attributes are other ones afterwards, such as the weight that ``torch.nn.utils.spectral_norm`` and
    ``weight_norm`` make in forward: the module gets back the one that it had, or where the micro-batch counts a detached copy.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._buffers: list[torch.Tensor] = []
        self._forms: list[tuple] = []
        self._addresses: list[int] | None = None  # None: some have none
        self._groups: list[tuple[list, list]] = []  # buffers, and copies, that one launch can copy
        self._attributes: list[tuple[dict, str, torch.Tensor | None]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Remembers every buffer and its values."""
        self._parts.refresh()
        if (self._places is not self._parts.buffers or self._addresses is None
                or self._addresses != _addresses(self._buffers)):
            self._follow()
        for group, copies in self._groups:
            _torch_compat.copy_all(copies, group)
        self._attributes = [(names, name, names.get(name)) for names, name in self._parts.attributes]

    def _follow(self) -> None:
        """Makes room for copies of the buffers that there are now, and as they are."""
        self._places = self._parts.buffers
        buffers = [buffer for _, _, buffer in self._places]
        forms = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
        self._addresses = None  # should there be no memory for what follows
        if forms != self._forms or not are_same(buffers, self._buffers):
            self._buffers = []
            self._groups = _grouped(buffers)
            self._buffers, self._forms = buffers, forms
        self._addresses = _addresses(buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what was remembered: the same tensors, with the values that they had."""
        for module, name, buffer in self._places:
            if _now(module, name) is not buffer:
                buffers_of(module)[name] = buffer
        for group, copies in self._groups:
            _torch_compat.copy_all(group, copies)
        for names, name, before in self._attributes:
            if names.get(name) is not before:
                names[name] = before

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the tensors by which forward has replaced others out of the arena."""
        for module, name, buffer in self._places:
            now = _now(module, name)
            if now is not None and now is not buffer:
                buffers_of(module)[name] = now.detach().clone()
        for names, name, before in self._attributes:
            now = names.get(name)
            if now is not before and isinstance(now, torch.Tensor):
                names[name] = now.detach().clone()


def _now(module: nn.Module, name: str) -> torch.Tensor | None:
    buffers = buffers_of(module)
    return buffers[name] if name in buffers else None


def _addresses(buffers: list[torch.Tensor]) -> list[int] | None:
    """Where they lie: a tensor that is given other contents by its ``data`` lies elsewhere. None if one is no strided
    tensor."""
    try:
        return list(map(torch.Tensor.data_ptr, buffers))
    except RuntimeError:
        return None


def _grouped(buffers: list[torch.Tensor]) -> list[tuple[list, list]]:
    """Buffers with room for their copies, those of one device and type together."""
    kinds: dict[tuple, tuple[list, list]] = {}
    for buffer in buffers:
        group, copies = kinds.setdefault((buffer.device, buffer.dtype), ([], []))
        group.append(buffer)
        copies.append(torch.empty_like(buffer))
    return list(kinds.values())
