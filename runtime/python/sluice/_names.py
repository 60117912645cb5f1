"""The local variables that a ``with`` block binds, as far as they keep a micro-batch's tensors alive.

A block has no frame of its own that ends with it, so what it binds lives on: a loss, outputs, intermediate results.
After a commit that would hold the arena, and after a discard the memory has gone.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_WRITES_THROUGH = sys.version_info >= (3, 13)  # PEP 667


class BoundNames:
    """Names that are bound between its making and ``rebind``, in a frame that is running meanwhile.

    In a module or class body these are names of the module or class. Variables declared ``global`` or ``nonlocal`` are
    not seen.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._before = dict(frame.f_locals)
        self._clear_snapshot()

    def rebind(self, new_value: Callable[[Any], Any]) -> None:
        """Gives each name that has been bound since another value, computed from its own."""
        values = self._frame.f_locals
        for name in list(values):
            value = values[name]
            if name not in self._before or self._before[name] is not value:
                values[name] = new_value(value)
            del value
        self._write_back(values)

    def take_back(self) -> None:
        """Gives each name that has been bound since the value that it had, or None."""
        values = self._frame.f_locals
        for name in list(values):
            if name not in self._before or self._before[name] is not values[name]:
                values[name] = self._before.get(name)
        self._write_back(values)

    def _in_function(self) -> bool:
        return bool(self._frame.f_code.co_flags & inspect.CO_OPTIMIZED)

    def _write_back(self, values: dict[str, Any]) -> None:
        if self._in_function() and not _WRITES_THROUGH:
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self._frame), ctypes.c_int(0))
            self._clear_snapshot()

    def _clear_snapshot(self) -> None:
        """Before PEP 667 a frame keeps the dictionary, which would keep what it names alive."""
        if self._in_function() and not _WRITES_THROUGH:
            self._frame.f_locals.clear()
