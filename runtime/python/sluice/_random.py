"""Random state that a micro-batch changes: kept before it, put back if it is discarded."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sluice._recurrent import dropout_states

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
        self._numpy = _NumpyState()
        self._saved: list[tuple[Callable[[Any], None], Any]] = []

    def save(self) -> None:
        """Remembers every state."""
        self._saved = [(put, get()) for get, put in [*self._global(), *self._given]]

    def foresee(self) -> None:
        """To be called where there is time, and ``save`` comes next: gets what takes long."""
        self._numpy.foresee()

    def now(self) -> dict[str, bytes]:
        """Every state as it is, by what its generator is called: equal bytes are equal states."""
        names = ["torch's default generator", "Python's random", *(["the GPU's default generator"] if self._cuda else [])]
        found = self._global()
        names += ["numpy.random"] * (len(found) - len(names)) + [f"generators[{at}]" for at in range(len(self._given))]
        return {name: _bytes_of(get()) for name, (get, _) in zip(names, [*found, *self._given], strict=True)}

    def restore(self) -> None:
        """Puts back what was remembered."""
        self._numpy.forget()
        for put, state in self._saved:
            put(state)

    def _global(self) -> list[Access]:
        result: list[Access] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
        if self._cuda:
            result.append((_CudaState.now, _CudaState.restore))
        if (numpy_random := _numpy_random()) is not None:
            result.append((self._numpy.get, numpy_random.set_state))
        return result


class _CudaState:
    """Of the current device's default generator, and of recurrent layers' dropout, which torch makes of it."""

    def __init__(self) -> None:
        self._generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self._state = self._generator.get_state()
        self._made = dropout_states.made
        self._of_dropout = dropout_states.copies()

    @classmethod
    def now(cls) -> _CudaState:
        dropout_states.look()
        return cls()

    @property
    def state(self) -> torch.Tensor:
        return self._state

    @torch.no_grad()
    def restore(self) -> None:
        """What has been made since is made again; else a generator that shares the state gets it, for torch would make anew
        what belongs to the one that is told."""
        if dropout_states.made != self._made or not hasattr(self._generator, "graphsafe_get_state"):
            self._generator.set_state(self._state)
            return
        self._generator.graphsafe_get_state().set_state(self._state)
        for state, before in self._of_dropout:
            state.copy_(before)


class _NumpyState:
    """The state of NumPy's default generator, which takes 0.1 ms to get, and in no time is seen not to have changed."""

    def __init__(self) -> None:
        self._foreseen: dict[str, Any] | None = None
        self._generator: Any = None
        self._bits = b""

    def foresee(self) -> None:
        self.forget()
        numpy_random = _numpy_random()
        if numpy_random is None or not hasattr(numpy_random, "get_bit_generator"):
            return
        state = numpy_random.get_state(legacy=False)
        generator = numpy_random.get_bit_generator()
        if state["bit_generator"] != "MT19937" or state["has_gauss"]:  # what is kept for the next call shows nowhere else
            return
        self._bits = state["state"]["key"].tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder)
        if self._lies_in(generator):
            self._foreseen, self._generator = state, generator

    def get(self) -> dict[str, Any]:
        numpy_random = _numpy_random()
        if self._foreseen is not None and numpy_random.get_bit_generator() is self._generator and self._lies_in(self._generator):
            return self._foreseen
        return numpy_random.get_state(legacy=False)

    def forget(self) -> None:
        self._foreseen = self._generator = None

    def _lies_in(self, generator: Any) -> bool:
        return ctypes.string_at(generator.ctypes.state_address, len(self._bits)) == self._bits


def _bytes_of(state: Any) -> bytes:
    if isinstance(state, _CudaState):
        state = state.state
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _numpy_random() -> Any:
    """None until somebody has imported it."""
    found = sys.modules.get("numpy.random")
    return found if found is not None and hasattr(found, "get_state") else None


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
