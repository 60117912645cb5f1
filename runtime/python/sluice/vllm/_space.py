"""The runtime library's range of memory that comes and goes by the chunk (abi/elastic_api.h), through ctypes."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from sluice.errors import SluiceError

_OUT_OF_MEMORY = 2
_HOST = -1

_SIGNATURES = {
    "sluice_last_error": (ctypes.c_char_p, []),
    "sluice_elastic_join": (ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]),
    "sluice_elastic_leave": (None, [ctypes.c_void_p]),
    "sluice_elastic_chunk_bytes": (ctypes.c_uint64, [ctypes.c_void_p]),
    "sluice_elastic_pool_chunks": (ctypes.c_uint32, [ctypes.c_void_p]),
    "sluice_elastic_reserve": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint32]),
    "sluice_elastic_base": (ctypes.c_void_p, [ctypes.c_void_p]),
    "sluice_elastic_back": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32, ctypes.c_uint32]),
    "sluice_elastic_give_back": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32]),
    "sluice_elastic_answer": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint32]),
    "sluice_elastic_demanded": (ctypes.c_uint32, [ctypes.c_void_p]),
    "sluice_elastic_await_demand": (ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_uint32]),
    "sluice_elastic_rouse": (None, [ctypes.c_void_p]),
    "sluice_elastic_refuse_rest": (None, [ctypes.c_void_p]),
    "sluice_elastic_show_used": (None, [ctypes.c_void_p, ctypes.c_uint64]),
    "sluice_elastic_ordered_away": (ctypes.c_int, [ctypes.c_void_p]),
    "sluice_elastic_rest": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint32]),
}


def library_path() -> str:
    """What `sluice run` says, else where it lies beside this package: in a wheel, and under an installation's prefix."""
    if said := os.environ.get("SLUICE_RUNTIME_LIBRARY"):
        return said
    package = Path(__file__).resolve().parents[1]
    places = [package / "lib", package.parents[1]]
    for place in places:
        if (library := place / "libsluice_runtime.so").exists():
            return str(library)
    raise SluiceError(f"libsluice_runtime.so is neither in {' nor in '.join(map(str, places))}; install the package sluice, or name the "
                      "library in SLUICE_RUNTIME_LIBRARY")


#: What waits for nothing: who calls it keeps the interpreter, as another thread may not give that back for milliseconds.
_QUICK = {"sluice_elastic_demanded", "sluice_elastic_ordered_away", "sluice_elastic_rouse", "sluice_elastic_show_used", "sluice_last_error"}


def _open(path: str) -> SimpleNamespace:
    """The library's functions by their names."""
    functions = SimpleNamespace()
    try:
        library, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(quick if name in _QUICK else library, name)
            function.restype = result
            function.argtypes = arguments
            setattr(functions, name, function)
    except (AttributeError, OSError) as why:
        raise SluiceError(f"cannot use {path}: {why}") from why
    return functions


class PoolSpace:
    """A range of an engine in the pool of a GPU, or on the host. It leaves the pool when nothing refers to it any more, or it is closed.

    Args:
        name: The engine's, in the pool.
        gpu: CUDA's number of it; None: the host.

    Raises:
        SluiceError: It cannot join, or the pool refuses what is no shortage.
    """

    def __init__(self, name: str, gpu: int | None = None) -> None:
        self._library = _open(library_path())
        self._handle = self._library.sluice_elastic_join(name.encode(), _HOST if gpu is None else gpu)
        if not self._handle:
            raise SluiceError(self._reason())
        # At the process's end other threads may still use the memory; the pool takes it back then by itself.
        self._leave = weakref.finalize(self, self._library.sluice_elastic_leave, self._handle)
        self._leave.atexit = False
        self.chunk_bytes = self._library.sluice_elastic_chunk_bytes(self._handle)
        self.pool_chunks = self._library.sluice_elastic_pool_chunks(self._handle)

    def close(self) -> None:
        """Leaves the pool; to be called by whoever is the last to use it. What torch has of its memory must not be read any more."""
        self._leave()

    def reserve(self, chunks: int) -> int:
        """Returns where the range begins."""
        self._check(self._library.sluice_elastic_reserve(self._handle, chunks))
        return self._library.sluice_elastic_base(self._handle)

    def back(self, chunks: Sequence[int], patience_ms: int) -> bool:
        status = self._library.sluice_elastic_back(self._handle, self._words(chunks), len(chunks), patience_ms)
        if status == _OUT_OF_MEMORY:
            return False
        self._check(status)
        return True

    def give_back(self, chunks: Sequence[int]) -> None:
        self._check(self._library.sluice_elastic_give_back(self._handle, self._words(chunks), len(chunks)))

    def answer(self, kept: int) -> None:
        """From now on what others demand is waited for; so many chunks stay."""
        self._check(self._library.sluice_elastic_answer(self._handle, kept))

    def demanded(self) -> int:
        return self._library.sluice_elastic_demanded(self._handle)

    def await_demand(self, timeout_ms: int) -> int:
        """Returns also when an order that it goes has come, or has ended, and when it is roused."""
        return self._library.sluice_elastic_await_demand(self._handle, timeout_ms)

    def rouse(self) -> None:
        self._library.sluice_elastic_rouse(self._handle)

    def refuse_rest(self) -> None:
        self._library.sluice_elastic_refuse_rest(self._handle)

    def show_used(self, used_bytes: int) -> None:
        self._library.sluice_elastic_show_used(self._handle, used_bytes)

    def ordered_away(self) -> bool:
        return self._library.sluice_elastic_ordered_away(self._handle) != 0

    def rest(self, needed: int) -> None:
        self._check(self._library.sluice_elastic_rest(self._handle, needed))

    def _words(self, chunks: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
        return (ctypes.c_uint32 * len(chunks))(*chunks)

    def _check(self, status: int) -> None:
        if status != 0:
            raise SluiceError(self._reason())

    def _reason(self) -> str:
        return self._library.sluice_last_error().decode()
