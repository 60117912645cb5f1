"""Failures whose cause may lie in the pool, told with what the pool knows: who holds the memory, or where to ask."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from sluice import _torch_compat
from sluice._runtime import Runtime
from sluice.errors import OutOfMemory

#: What CUDA says of an access to an address without memory.
FAULTS = ("illegal memory access", "unspecified launch failure")

#: A job that meets its limit again and again is told so now and then.
SECONDS_BETWEEN_WORDS = 10.0


#: So many micro-batches in a row that lost their memory are worth a word; then twice as many, until one counts.
TRIES_WORTH_A_WORD = 32


class TriesInVain:
    """Says when memory goes so often that training gets nowhere: it computes all the time, and nothing looks wrong."""

    def __init__(self) -> None:
        self._commits = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._count, self._reported_at = 0, TRIES_WORTH_A_WORD

    def discarded(self, commits: int, samples: int) -> None:
        """A micro-batch of so many samples has lost its memory, after so many that have counted in all."""
        if commits != self._commits:
            self._commits = commits
            self._begin_anew()
        self._count += 1
        if self._count >= self._reported_at:
            self._reported_at *= 2
            print(f"sluice: the last {self._count} micro-batches of up to {samples} samples have lost their memory before they were done, "
                  "so that training gets nowhere. What would help: a smaller micro_batch, which takes less time; models that stay warm "
                  "for longer (warm.min_idle, warm.max_idle of the policy); a larger pool", file=sys.stderr, flush=True)


def shortage(runtime: Runtime) -> str:
    """Who holds the pool's memory, and what would leave this job more of it."""
    return "sluice: " + runtime.shortage().decode(errors="replace")


def _extend(why: BaseException, sentence: str) -> None:
    """Into the message itself: what is logged with ``str(why)`` has no notes."""
    text = str(why)
    if sentence.partition(":")[0] + ":" not in text:
        why.args = (f"{text}\n{sentence}", *why.args[1:])


def _described(why: BaseException) -> str:
    return f"{type(why).__name__}: {why}"


class Trouble:
    """Explains exceptions of one process that shares the pool.

    Thread-safe: ``explained`` may be entered by several threads.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._here = threading.local()
        self._said_at = -SECONDS_BETWEEN_WORDS
        self._rehearsal: str | None = None  # what it has failed with
        self._samples = 0  # of it

    @contextlib.contextmanager
    def explained(self, discards: Callable[[], int]) -> Iterator[None]:
        """Extends the message of an exception that passes.

        Args:
            discards: How many micro-batches have lost their memory so far.
        """
        self._here.explains = True
        try:
            yield
        except BaseException as why:
            self.explain(why, discards())
            raise
        finally:
            self._here.explains = False

    def rehearsal_failed(self, why: Exception, samples: int) -> None:
        """Training goes on: what the rehearsal minds may be its size. But in a rank whose rehearsal alone has failed the next
        failure is that ranks differ, which tells nothing of the cause."""
        self.explain(why, 0)
        self._rehearsal, self._samples = _described(why), samples

    def forget_rehearsal(self) -> None:
        """A micro-batch has been committed."""
        self._rehearsal = None

    def explain(self, why: BaseException, discards: int) -> None:
        """Extends the message of an exception, if the pool has to do with it, or if the rehearsal has failed otherwise."""
        explains_itself = isinstance(why, (torch.OutOfMemoryError, OutOfMemory)) or self._rehearsal in (None, _described(why))
        if isinstance(why, RuntimeError) and not explains_itself:
            _extend(why, f"sluice's rehearsal with {self._samples} samples had failed before: {self._rehearsal}")
        if isinstance(why, torch.OutOfMemoryError):
            _extend(why, shortage(self._runtime))
        elif isinstance(why, RuntimeError) and discards > 0 and any(fault in str(why) for fault in FAULTS):
            _extend(why, self._about_fault(discards))

    def watch_cuda(self) -> None:
        """From now on says on standard error who holds the memory when CUDA's allocator gives up outside of a step.

        What torch raises there cannot be extended; without the hook in torch, the runtime's own word stays.
        """
        if _torch_compat.watch_shortages(self._observe):
            self._runtime.say_shortages(0)

    def _observe(self, device: int, wanted: int, _allocated: int, _free: int) -> None:
        """Called by torch in the thread that has found too little; what it raised would take the place of torch's own."""
        with contextlib.suppress(Exception):
            now = time.monotonic()
            if not getattr(self._here, "explains", False) and now - self._said_at >= SECONDS_BETWEEN_WORDS:
                self._said_at = now
                print(f"{shortage(self._runtime)} ({wanted} bytes were wanted on GPU {device})", file=sys.stderr)

    @staticmethod
    def _about_fault(discards: int) -> str:
        folder = os.environ.get("SLUICE_RUNTIME_DIR")
        where = f" --runtime-dir {shlex.quote(folder)}" if folder else ""
        return (
            f"sluice: {discards} micro-batches of this process have lost their memory to the inference server; where the "
            "kernel log (Xid 31) or compute-sanitizer names the address, this tells what lay there and who got it: "
            f"sluice pool show{where} --pid {os.getpid()} --address 0x…"
        )
