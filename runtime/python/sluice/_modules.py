"""What a model is made of: looked at in every step, while the device waits."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import torch
from torch import nn

from sluice._torch_compat import buffers_of, children_of, parameters_of


class Parts:
    """The modules of models, each in the order of ``model.modules()``, with their own parameters and buffers.

    To walk through a model takes Python as long as the device needs for several layers, to see that nothing has changed a
    tenth of that: most tables are empty, and need only be asked for their length.

    Args:
        apart_from: Whose modules are left out.
    """

    def __init__(self, *models: nn.Module, apart_from: nn.Module | None = None) -> None:
        self._models = models
        self._apart_from = apart_from
        # Of modules, parameters and buffers; dictionaries, or what TorchScript has instead.
        self._full: list = []
        self._empty: list = []
        self._named: list = []  # those of buffers
        self._entries: list = []
        self._names: list[str] = []  # of buffers
        #: Those that several modules have come several times.
        self.parameters: list[nn.Parameter] = []
        #: Whose, under which name, and which.
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        #: Tensors that are neither: in whose ``__dict__``, and under which name.
        self.attributes: list[tuple[dict[str, Any], str]] = []
        self.refresh()

    def refresh(self) -> None:
        """Looks again. Where something has changed, the lists are other ones afterwards."""
        entries = _values(self._full)
        if (entries and are_same(entries, self._entries)
                and not any(map(len, self._empty)) and _names(self._named) == self._names):
            return
        modules = _modules_of(self._models, self._apart_from)
        tables = [table for module in modules for table in (children_of(module), parameters_of(module), buffers_of(module))]
        self.parameters = [param for module in modules for param in parameters_of(module).values() if param is not None]
        self.buffers = [(module, name, buffer) for module in modules for name, buffer in buffers_of(module).items()
                        if buffer is not None]
        self.attributes = [(vars(module), name) for module in modules for name, value in vars(module).items()
                           if isinstance(value, torch.Tensor)]
        self._full = [table for table in tables if len(table) > 0]
        self._empty = [table for table in tables if len(table) == 0]
        self._named = [table for table in map(buffers_of, modules) if len(table) > 0]
        self._entries, self._names = _values(self._full), _names(self._named)


def are_same(some: list, others: list) -> bool:
    """Whether they hold the same objects; tensors that are equal may be others."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _values(tables: list) -> list:
    return [value for table in tables for value in table.values()]


def _names(tables: list) -> list[str]:
    return list(chain.from_iterable(map(operator.methodcaller("keys"), tables)))


def _modules_of(models: tuple[nn.Module, ...], apart_from: nn.Module | None) -> list[nn.Module]:
    left_out = set() if apart_from is None else set(apart_from.modules())
    found: dict[nn.Module, None] = {}
    left = list(reversed(models))
    while left:
        module = left.pop()
        if module not in found and module not in left_out:
            found[module] = None
            left += [child for child in reversed(list(children_of(module).values())) if child is not None]
    return list(found)
