"""The training runtime (libsluice_runtime.so) through ctypes; see abi/step_api.h for the contract."""

from __future__ import annotations

import ctypes
import os

from sluice import _sharing
from sluice._sharing import warn

SOUND, REVOKED, STARVED = 0, 1, 2
NONE, HOST, CUDA = 0, 1, 2  # backend
TAKEN_AWAY, BEGUN, DEFERRED = 0, 1, 2  # commit_begin; deferred: commit_resolve will tell
OPEN = -1  # commit_resolve: not yet
LATER, GRANTED, DROPPED, LOST, DIFFERS = range(5)  # agree


class Collective(ctypes.Structure):
    """What the ranks of a job on the host are asked about."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("operation", "type", "count", "root")]


class _Place(ctypes.Structure):
    """A rank's, in a group of some."""

    _fields_ = [("rank", ctypes.c_uint), ("ranks", ctypes.c_uint)]


_SIGNATURES = {
    "sluice_last_error": (ctypes.c_char_p, []),
    "sluice_join_host": (ctypes.c_int, []),
    "sluice_backend": (ctypes.c_int, []),
    "sluice_serving": (ctypes.c_int, []),
    "sluice_begin": (ctypes.c_int, [ctypes.c_uint32, ctypes.c_uint32]),
    "sluice_generation": (ctypes.c_uint64, []),
    "sluice_arena_state": (ctypes.c_int, []),
    "sluice_commit_begin": (ctypes.c_int, [ctypes.c_int]),
    "sluice_commit_end": (None, [ctypes.c_uint32, ctypes.c_int]),
    "sluice_commit_resolve": (ctypes.c_int, [ctypes.c_uint32]),
    "sluice_commit_made": (ctypes.c_int, [ctypes.c_uint32]),
    "sluice_discard": (None, []),
    "sluice_work_together": (None, [ctypes.c_int]),
    "sluice_end_with": (ctypes.c_int, [ctypes.c_void_p]),
    "sluice_discarded_ns": (ctypes.c_uint64, []),
    "sluice_reopened_ns": (ctypes.c_int64, []),
    "sluice_survivors": (ctypes.c_uint64, []),
    "sluice_enter": (None, [ctypes.c_int]),
    "sluice_arena_capacity": (ctypes.c_uint64, []),
    "sluice_arena_peak": (ctypes.c_uint64, []),
    "sluice_reachable_bytes": (ctypes.c_uint64, []),
    "sluice_pool_bytes": (ctypes.c_uint64, []),
    "sluice_shortage": (ctypes.c_char_p, []),
    "sluice_say_shortages": (None, [ctypes.c_int]),
    "sluice_wait_memory": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_uint32]),
    "sluice_ranks_join": (ctypes.c_int, [ctypes.POINTER(ctypes.c_char_p), ctypes.c_uint]),
    "sluice_ranks_complete": (ctypes.c_int, [ctypes.POINTER(_Place)]),
    "sluice_agree": (ctypes.c_int, [ctypes.c_uint, ctypes.POINTER(Collective), ctypes.c_int, ctypes.c_uint32]),
    "sluice_agree_made": (None, []),
    "sluice_agree_withdraw": (ctypes.c_int, []),
    "sluice_ranks_number": (ctypes.c_uint64, []),
    "sluice_ranks_missing": (ctypes.c_uint, [ctypes.POINTER(ctypes.c_uint), ctypes.c_uint]),
    "sluice_ranks_loss": (ctypes.c_char_p, []),
    "sluice_ranks_difference": (ctypes.c_int, [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint),
                                               ctypes.POINTER(Collective)]),
    "sluice_plan_start": (ctypes.c_int, [ctypes.c_uint32, ctypes.c_int, ctypes.c_int]),
    "sluice_plan_next": (ctypes.c_uint32, [ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_int)]),
    "sluice_plan_committed": (None, [ctypes.c_uint32, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double]),
    "sluice_plan_discarded": (None, [ctypes.c_uint32, ctypes.c_int, ctypes.c_int]),
}

MOST_RANKS = 64  # that agree


class Runtime:
    """The library, typed. One object a process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype = result
            function.argtypes = arguments
            setattr(self, name.removeprefix("sluice_"), function)

    def error(self) -> str:
        return self.last_error().decode()

    def plan(self, remaining: int) -> tuple[int, int, bool]:
        """Samples of the next micro-batch, 0 to wait, the bytes that it needs or waits for, and whether it computes activations
        again in backward."""
        needed, recompute = ctypes.c_uint64(), ctypes.c_int()
        samples = self.plan_next(remaining, ctypes.byref(needed), ctypes.byref(recompute))
        return samples, needed.value, recompute.value != 0

    def join_groups(self, keys: list[str]) -> bool:
        """Of ranks that agree, by what each group is called; the first has all."""
        return self.ranks_join((ctypes.c_char_p * len(keys))(*(key.encode() for key in keys)), len(keys)) == 0

    def complete_groups(self, places: list[tuple[int, int]]) -> bool:
        """When all ranks have joined: which this one is in each, of how many."""
        return self.ranks_complete((_Place * len(places))(*places)) == 0

    def missing(self) -> list[int]:
        """The ranks of the group that have not come to what this one asks."""
        ranks = (ctypes.c_uint * MOST_RANKS)()
        return list(ranks[:self.ranks_missing(ranks, MOST_RANKS)])

    def difference(self) -> tuple[int, list[int], list[Collective]]:
        """A number, and two ranks that mean different calls by it."""
        number, ranks, calls = ctypes.c_uint64(), (ctypes.c_uint * 2)(), (Collective * 2)()
        self.ranks_difference(ctypes.byref(number), ranks, calls)
        return number.value, list(ranks), list(calls)


_attached: Runtime | None = None


def _memory_outside_pool() -> str | None:
    """A setting of torch's CUDA allocator that the program has made itself, with which memory is not the pool's.

    What stands in the environment of `sluice run` is refused there.
    """
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return f"torch's allocator is {torch.cuda.get_allocator_backend()}"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, "").replace(" ", "").split(","):
            return f"{name} has expandable_segments:True"
    return None


def _of_backend(runtime: Runtime, uses_cuda: bool) -> Runtime | None:
    """The runtime if it shares the memory that a model lies in."""
    if runtime.backend() == (CUDA if uses_cuda else HOST):
        return runtime
    mine, its = ("the GPU", "the processor's") if uses_cuda else ("the processor", "the GPU's")
    warn(f"it is {its} memory that this process shares", f"a model on {mine}")
    return None


def ranks_agree() -> bool:
    """Whether ranks on GPUs agree on each of their collectives before it is made (docs/collectives.md)."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as loaded:
        return any("/libsluice_nccl.so" in line for line in loaded)


def attach(uses_cuda: bool) -> Runtime | None:
    """The runtime if this process shares the pool; None for plain PyTorch, after a word on standard error if sharing was
    wanted but is not possible."""
    global _attached
    if _attached is not None and _attached.backend() == NONE:
        warn("a forked child of a training process cannot train in the pool; have it started anew, by multiprocessing's start "
              "method spawn, and it is a job of its own")
        return None
    if _attached is not None:
        return _of_backend(_attached, uses_cuda)
    path = _sharing.library_path()
    if path is None or not _sharing.check_torch() or _sharing.open_library(path) is None:
        return None

    import torch

    runtime = Runtime(path)
    if uses_cuda:
        if outside := _memory_outside_pool():
            warn(f"{outside}; its memory lies outside the pool. Remove the setting, or do without `sluice run`")
            return None
        torch.cuda.init()
        torch.empty(1, device="cuda")  # the gate joins at the first allocation
        if runtime.backend() != CUDA:
            if not hasattr(ctypes.CDLL(None), "sluice_gate_table"):
                warn("the gate is not in this process: something between `sluice run` and it has cleared LD_PRELOAD")
            return None  # else the gate has said why
    else:
        part = _sharing.open_host_part(path)
        if part is None:
            return None
        if runtime.join_host() != 0:
            warn(runtime.error())
            return None
        if not _sharing.install_on_host(part):
            return None
    _attached = runtime
    return runtime
