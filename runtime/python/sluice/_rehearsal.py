"""Tries before the first step, so that what is created once is not born in a micro-batch."""

from __future__ import annotations

import torch

from sluice._backward import release_frames_of
from sluice._micro_batch import MicroBatch
from sluice._recomputation import Trace
from sluice.errors import SluiceError


class Rehearsal(MicroBatch):
    """A try outside the arena, whose result is forgotten.

    What libraries and modules create once (workspaces, handles, cached masks) is then not born in memory that is taken
    away, and lies close together.
    """

    is_kept = False
    failed = False
    trace: Trace | None = None  # of one that has not failed, where there are two ways to compare

    def _enter(self) -> None:
        if self._engine.cuda:
            self._threading = torch.autograd.set_multithreading_enabled(False)

    def _leave(self) -> None:
        if self._threading is not None:
            self._threading.__exit__(None, None, None)
            self._threading = None

    def _end(self, failure: BaseException | None) -> bool:
        engine = self._engine
        self.failed = failure is not None
        refusal = self._refusal()
        self.trace = None if self.failed else engine.trace()
        engine.abandon()
        engine.restore()
        if not self.failed:
            engine.outside.has_seen(self._code)
        if failure is not None and not isinstance(failure, Exception):
            return False
        if failure is not None:  # if it is not the size that it minds, the first slice says so again
            engine.trouble.rehearsal_failed(failure, self.size)
            release_frames_of(failure)
        self._part = self._weight = self._kept = None
        if self._names is not None:
            self._names.take_back()
        torch.clear_autocast_cache()
        if engine.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if refusal is not None:
            raise refusal
        return True

    def _refusal(self) -> SluiceError | None:
        try:
            self._engine.refuse_outside(self._watch)
        except SluiceError as why:
            return why.with_traceback(None)
        return None


class EagerRehearsal(Rehearsal):
    """One in which torch.compile leaves everything as it is."""

    is_eager = True

    def _enter(self) -> None:
        super()._enter()
        self._stance = torch.compiler.set_stance("force_eager")

    def _leave(self) -> None:
        self._stance.__exit__(None, None, None)
        super()._leave()
