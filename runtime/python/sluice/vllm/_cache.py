"""A KV cache that several threads see: the engine's, which schedules and computes, and one of its own, which is there when the engine
rests, so that what others demand is given, and what is idle goes back, and which asks for a chunk before the engine needs it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from sluice.vllm._elastic import ElasticBlocks, Keeping
from sluice.vllm._layout import Layout
from sluice.vllm._space import PoolSpace

logger = logging.getLogger("vllm.sluice")
LONGEST_LOOK_S = 1.0  # so soon the thread sees that the cache is gone
PATIENCE_MS = 20  # for memory, where nothing else is to be done
LONGEST_STEP_S = 0.1  # after which the device is asked whether it is over


class Device(Protocol):
    """What computes. It does not keep the cache."""

    def mark(self) -> Callable[[], object]:
        """What returns when all that this thread has put on it until now is over."""

    def finish(self) -> None:
        """Returns when all is."""


class ElasticCache:
    """`lock` is held by whoever uses the blocks; the engine's thread holds it while it schedules, and while it takes in what a step has
    made. When this is gone its space leaves the pool."""

    def __init__(self, layout: Layout, space: PoolSpace, keeping: Keeping, make_block: Callable[[int], Any], forget: Callable[[Any], object],
                 device: Device) -> None:
        self.lock = threading.RLock()
        self.space = space
        self.blocks = ElasticBlocks(layout, space, keeping, make_block, forget)
        self._preempt: weakref.WeakMethod | None = None
        self._step_over = threading.Event()
        self._device = device
        self._submitted: deque[tuple[int, Callable[[], object]]] = deque()  # steps that have not ended
        self._ahead_over = threading.Event()
        self._ahead_granted = False
        space.answer(kept=1)
        threading.Thread(target=_attend_while_it_lives, args=(weakref.ref(self), space, device), name="sluice-kv", daemon=True).start()

    def preempt_by(self, preempt: Callable[[int | None], int]) -> None:
        """Whom requests are ended by: a method, whose object this does not keep."""
        self._preempt = weakref.WeakMethod(preempt)

    def before_step(self) -> None:
        """The engine is about to schedule one; by the thread that has the lock."""
        self.blocks.attend(self._preempting())

    def launched(self) -> int:
        """The step that has been scheduled is in flight; which one it is."""
        step = self.blocks.launched()
        self.blocks.show_used()
        if self.blocks.wants_ahead():
            self.space.rouse()
        return step

    def submitted(self, step: int) -> None:
        """All that this one computes has been put on the device."""
        self._submitted.append((step, self._device.mark()))

    def after_step(self) -> None:
        """The step launched first has ended, and what it made has been taken in. The device may still compute where nothing that was made
        is wanted, as of the first part of a text that is to be embedded."""
        step = self.blocks.ended()
        while self._submitted and self._submitted[0][0] <= step:
            self._submitted.popleft()[1]()
        self.blocks.attend()
        self._step_over.set()

    def grow(self) -> bool:
        """Takes what is on its way. Where no request has any blocks there is nothing to do but to wait for some."""
        if self.blocks.asks_ahead:
            self._ahead_over.wait()
            if self._end_ahead():
                return True
        return self.blocks.grow(0 if self.blocks.free.live else PATIENCE_MS)

    def _preempting(self) -> Callable[[int | None], int] | None:
        return None if self._preempt is None else self._preempt()

    def attend_beside_engine(self) -> tuple[float, bool]:
        """What the thread of its own does. Seconds until there is more to do, and whether that is when a step has ended."""
        with self.lock:
            computing = self.blocks.computing
            wait = self.blocks.attend(None if computing else self._preempting() or _nobody, PATIENCE_MS)
            self._step_over.clear()
            ordered = self.space.ordered_away()
            return min(LONGEST_LOOK_S, wait or LONGEST_LOOK_S), ordered or computing and self.space.demanded() > 0

    def ask_ahead(self) -> None:
        """While the engine computes; it only waits for this where it needs a chunk itself."""
        with self.lock:
            chunk = self.blocks.begin_ahead()
            if chunk is None:
                return
            self._ahead_granted = False
            self._ahead_over.clear()
        try:
            self._ahead_granted = self.space.back([chunk], 0)
        finally:
            self._ahead_over.set()
            with self.lock:
                self._end_ahead()

    def _end_ahead(self) -> bool:
        """By whoever comes first, when it is over; by the thread that has the lock."""
        if self.blocks.asks_ahead:
            self.blocks.end_ahead(self._ahead_granted)
        return self._ahead_granted

    def await_step(self, seconds: float) -> None:
        """Until one has ended. Whoever has all answers that he wants need not come for what the last step made: then the device is asked."""
        if not self._step_over.wait(min(seconds, LONGEST_STEP_S)):
            with self.lock:
                if self._submitted:
                    step, await_device = self._submitted[-1]
                    await_device()
                    self.blocks.is_over(step)


def _nobody(_chunks: int | None) -> int:
    """Nothing has been scheduled yet."""
    return 0


def _attend_while_it_lives(cache: weakref.ref[ElasticCache], space: PoolSpace, device: Device) -> None:
    """Leaves the pool afterwards: torch may keep views of the memory, which nobody reads any more."""
    while (here := cache()) is not None:
        try:
            here.ask_ahead()
            seconds, when_step_has_ended = here.attend_beside_engine()
            if when_step_has_ended:
                here.await_step(seconds)
                continue
        except Exception:
            logger.exception("What others demand of the KV cache could not be attended to; it is tried again")
            time.sleep(LONGEST_LOOK_S)  # a demand that stands would have it tried at once
            continue
        del here  # else it lived as long as this waits
        space.await_demand(max(1, int(seconds * 1000)))
    device.finish()
    space.close()
