"""What a model is made of: looked at in every step, while the device waits."""

from __future__ import annotations

import operator
from itertools import chain

import torch
from torch import nn


class Parts:
    """A model's modules, in the order of ``model.modules()``, with their own parameters and buffers.

    To walk through a model takes Python as long as the device needs for several layers, to see that nothing has changed a
    tenth of that.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list = []  # of modules, parameters and buffers; dictionaries, or what TorchScript has instead
        self._entries: list = []
        self._names: list[str] = []  # of buffers
        #: Those that several modules have come several times.
        self.parameters: list[nn.Parameter] = []
        #: Whose, under which name, and which.
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.refresh()

    def refresh(self) -> None:
        """Looks again."""
        entries = _values(self._tables)
        names = list(chain.from_iterable(map(_KEYS, self._tables[2::3])))
        if (self._tables and names == self._names and len(entries) == len(self._entries)
                and all(map(operator.is_, entries, self._entries))):
            return
        modules = _modules_of(self._model)
        tables = [table for module in modules for table in (module._modules, module._parameters, module._buffers)]
        self.parameters = [param for module in modules for param in module._parameters.values() if param is not None]
        self.buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()
                        if buffer is not None]
        self._tables, self._entries = tables, _values(tables)
        self._names = list(chain.from_iterable(map(_KEYS, tables[2::3])))


_VALUES, _KEYS = operator.methodcaller("values"), operator.methodcaller("keys")


def _values(tables: list) -> list:
    return list(chain.from_iterable(map(_VALUES, tables)))


def _modules_of(model: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [child for child in reversed(list(module._modules.values())) if child is not None]
    return list(found)
