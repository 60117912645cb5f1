"""A pool in the test's own process, whose memory is taken away at operators that the test names.

Like the host backend it notices at operator boundaries; other than that it also knows every storage that was made in a
micro-batch, so that a test can ask what lives on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sluice import _engine, _runtime
from sluice._agreement import are_fake, has_others

AT_COMMIT = 1 << 30  # an operator that no micro-batch reaches


class MemoryGone(RuntimeError):
    """What an allocation raises when the arena has been taken away."""


class _Boundary(TorchDispatchMode):
    """Calls the runtime before every operator, and tells it what storages the operator has made."""

    def __init__(self, runtime: ScriptedRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if are_fake(types):
            return func(*args, **kwargs)
        if has_others(types):
            return NotImplemented  # DTensor's operators are those that it runs itself
        self._runtime.boundary()
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs))
                 if isinstance(t, torch.Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._runtime.made(tensor.untyped_storage())
        return result


class Dropping(TorchDispatchMode):
    """Leaves out what would be launched: operators that write into tensors with dimensions. Scalars stand for tensors on
    the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [value for argument, value in zip(func._schema.arguments, args)
                   if argument.alias_info is not None and argument.alias_info.is_write]
        tensors = [t for t in torch.utils._pytree.tree_leaves(written) if isinstance(t, torch.Tensor)]
        if any(t.dim() > 0 for t in tensors):
            return written[0] if func._schema.returns else None
        return func(*args, **kwargs)


class ScriptedRuntime:
    """What `sluice._runtime.Runtime` offers, without a pool.

    Args:
        operator: Every second micro-batch loses its memory at this operator, counted from 0, or at its commit if it has
            fewer. None: none does.
        silently: Whether operators go on without an exception, as launches do on CUDA.
        watch: Whether to look at operators at all; without, memory is lost at commits alone.
        defer: Whether a commit whose memory is lost there is only told so when it is resolved, and nothing that was launched
            in between is done.
        serving: Whether there is a server.
    """

    path = "scripted"

    def __init__(self, operator: int | None = None, silently: bool = False, watch: bool = True,
                 defer: bool = False, serving: bool = True) -> None:
        self._operator = operator
        self._defer = defer
        self._serving = serving
        self._dropping: Dropping | None = None
        self._silently = silently
        self._mode = _Boundary(self) if watch else None
        self._entered = False
        self._state = _runtime.SOUND
        self._tries = 0
        self._operators = 0
        self.operators = 0  # of the longest micro-batch
        self._storages: dict[int, StorageWeakRef] = {}
        self._gone: list[StorageWeakRef] = []
        self._largest, self._fixed = 0, 0
        self._may_recompute = False
        self._planned = 0  # the second and third of four compute activations again, if they may
        self.discards = 0
        self.dropped = 0  # commits that had been deferred
        self.together = False  # whether micro-batches work together with other processes
        self.interrupt = False  # whether a signal's handler raises at the next wait for a commit
        self._settling = 0
        self.left_behind: list[int] = []  # storages that lived on, at each commit

    # --- what tests and the mode ask -----------------------------------------------------------------------------------

    def boundary(self) -> None:
        if self._operators == self._operator and self._tries % 2 == 1:
            self._revoke()
        self._operators += 1
        self.operators = max(self.operators, self._operators)
        if self._state != _runtime.SOUND and not self._silently:
            raise MemoryGone("sluice: the micro-batch's memory has been taken away")

    def made(self, storage: torch.UntypedStorage) -> None:
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def _revoke(self) -> None:
        """Somebody else writes into the memory from now on."""
        self._state = _runtime.REVOKED
        for each in self._alive():
            storage = torch.UntypedStorage._new_with_weak_ptr(each.cdata)
            if storage is not None:
                storage.fill_(0xA5)

    def _alive(self) -> list[StorageWeakRef]:
        return [each for each in self._storages.values() if not each.expired()]

    # --- what the step asks --------------------------------------------------------------------------------------------

    def work_together(self, together: int) -> None:
        self.together = bool(together)

    def begin(self, _micro_batch: int, _global_batch: int) -> int:
        self._tries += 1
        self._operators = 0
        self._storages = {}
        self._state = _runtime.SOUND
        return 0

    def enter(self, entered: int) -> None:
        if self._mode is not None and bool(entered) != self._entered:
            (self._mode.__enter__ if entered else lambda: self._mode.__exit__(None, None, None))()
        self._entered = bool(entered)

    def arena_state(self) -> int:
        return self._state

    def serving(self) -> int:
        return int(self._serving)

    def commit_begin(self, may_defer: bool) -> int:
        sound = self._state == _runtime.SOUND
        if self._operator is not None and self._tries % 2 == 1:
            self._revoke()
        if not self._defer or not may_defer or not sound:
            return int(self._state == _runtime.SOUND)
        if self._state != _runtime.SOUND:
            self._dropping = Dropping()
            self._dropping.__enter__()
        return _runtime.DEFERRED

    def commit_resolve(self, _timeout_ms: int) -> int:
        self._settling += 1
        if self._settling % 3:
            return _runtime.OPEN
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        if self._dropping is not None:
            self._dropping.__exit__(None, None, None)
            self._dropping = None
            self.dropped += 1
        return int(self._state == _runtime.SOUND)

    def commit_made(self, _timeout_ms: int) -> int:
        self._settling += 1
        return int(self._settling % 3 == 0)

    def commit_end(self, _samples: int, _outlived: int) -> None:
        self.left_behind.append(len(self._alive()))

    def discarded_ns(self) -> int:
        return self.discards * 1_000_000_000

    def discard(self) -> None:
        self.discards += 1
        self._gone = self._alive()

    def survivors(self) -> int:
        return sum(not each.expired() for each in self._gone)

    def plan_start(self, largest: int, fixed: int, may_recompute: int) -> int:
        self._largest, self._fixed, self._may_recompute = largest, fixed, bool(may_recompute)
        return 0

    def plan(self, remaining: int) -> tuple[int, int, bool]:
        self._planned += 1
        recompute = self._may_recompute and self._planned // 2 % 2 == 1
        if self._fixed:
            return min(self._largest, remaining), 0, recompute
        slices = -(-remaining // self._largest)
        return -(-remaining // slices), 0, recompute

    def plan_committed(self, _samples: int, _recomputed: int, _bytes: int, _at_first_bytes: int, _seconds: float) -> None:
        pass

    def plan_discarded(self, _samples: int, _recomputed: int, _state: int) -> None:
        pass

    def arena_peak(self) -> int:
        return 0

    def shortage(self) -> bytes:
        return b"nobody holds anything"


class PatientRuntime(ScriptedRuntime):
    """Gloo's threads let go of what they have sent a moment after that has arrived."""

    def commit_end(self, samples: int, outlived: int) -> None:
        _wait_until_gone(self._alive)
        super().commit_end(samples, outlived)

    def survivors(self) -> int:
        _wait_until_gone(super().survivors)
        return super().survivors()


def _wait_until_gone(left: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5.0  # tests leave survivors on purpose, too
    while left() and time.monotonic() < deadline:
        os.sched_yield()


@contextlib.contextmanager
def sharing(runtime: ScriptedRuntime | None) -> Iterator[ScriptedRuntime | None]:
    """Steps that are made meanwhile train with this runtime; None: in plain PyTorch."""
    real = _engine._runtime.attach
    _engine._runtime.attach = lambda _cuda: runtime
    try:
        yield runtime
    finally:
        _engine._runtime.attach = real
