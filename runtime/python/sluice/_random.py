"""Random state that a micro-batch changes: kept before it, put back if it is discarded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Gets a state, and puts one back.
Access = tuple[Callable[[], Any], Callable[[Any], None]]


class RandomState:
    """The default generators of torch (CPU, and the current CUDA device), Python and NumPy, and those given.

    NumPy's only once ``numpy.random`` has been imported. States are restored bit by bit.

    Args:
        generators: ``random.Random``, ``numpy.random.Generator``, ``numpy.random.RandomState`` or ``torch.Generator``.
        cuda: Whether the current CUDA device's default generator is used.

    Raises:
        TypeError: for a generator of another kind.
    """

    def __init__(self, generators: Iterable[Any], cuda: bool) -> None:
        if isinstance(generators, (str, bytes)) or not isinstance(generators, Iterable):
            raise TypeError(f"generators must be a sequence of random generators, not {type(generators).__name__}")
        self._given = [_access(generator) for generator in generators]
        self._cuda = cuda
        self._saved: list[tuple[Callable[[Any], None], Any]] = []

    def save(self) -> None:
        """Remembers every state."""
        self._saved = [(put, get()) for get, put in [*self._global(), *self._given]]

    def restore(self) -> None:
        """Puts back what was remembered."""
        for put, state in self._saved:
            put(state)

    def _global(self) -> list[Access]:
        result: list[Access] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
        if self._cuda:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            result.append((generator.get_state, generator.set_state))
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None and hasattr(numpy_random, "get_state"):
            result.append((numpy_random.get_state, numpy_random.set_state))
        return result


def _access(generator: Any) -> Access:
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate, generator.setstate
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        if isinstance(generator, numpy_random.RandomState):
            return generator.get_state, generator.set_state
        if isinstance(generator, numpy_random.Generator):
            bits = generator.bit_generator
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
    raise TypeError(f"{type(generator).__name__} is no random generator whose state can be restored; generators takes "
                    "random.Random, numpy.random.Generator, numpy.random.RandomState and torch.Generator")
