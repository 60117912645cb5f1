"""How many samples the next micro-batch has, whether it computes activations again, and waiting for the memory that it needs."""

from __future__ import annotations

import sys
import time

from sluice._runtime import Runtime
from sluice._trouble import shortage
from sluice.errors import OutOfMemory

#: How long one wait for memory lasts before Python looks at its signals again.
WAIT_SLICE_MS = 100
#: After so long a process that waits tells for what or for whom; again every so often if others wait for it, else after twice as long.
FIRST_NOTICE_SECONDS, NOTICE_SECONDS = 30.0, 60.0


class Planner:
    """Sizes of micro-batches: equal ones in plain PyTorch, what fits in the pool.

    Args:
        runtime: None for plain PyTorch.
        adapt: Whether a micro-batch may become smaller when memory is short.
        together: Whether other processes wait for this one, in its micro-batches or at the end of its steps.
        may_recompute: Whether activations can be computed again in backward.
    """

    #: Who has started the process's one planner, and for how many samples.
    _started: tuple[Planner, int] | None = None

    def __init__(self, runtime: Runtime | None, adapt: bool, together: bool, may_recompute: bool = False) -> None:
        self._runtime = runtime
        self._adapt = adapt
        self._together = together
        self._may_recompute = may_recompute
        self.recomputes = False  # the next slice
        self.wait_seconds = 0.0

    def keep_activations(self) -> None:
        """From now on."""
        self._may_recompute = False
        Planner._started = None

    def next(self, remaining: int, largest: int) -> int:
        """Samples of the next slice; waits for memory if not even the smallest permitted one fits.

        Raises:
            OutOfMemory: if that can never fit.
        """
        slices = -(-remaining // largest)
        evenly = -(-remaining // slices)
        if self._runtime is None:
            return evenly
        if Planner._started != (self, largest):
            self._runtime.plan_start(largest, 0 if self._adapt else 1, 1 if self._may_recompute else 0)
            Planner._started = (self, largest)
        while True:
            count, needed, self.recomputes = self._runtime.plan(remaining)
            if count > 0:
                return count if self._adapt else min(count, evenly)  # what fits and does not adapt is cut as without a pool
            self._wait(needed, 1 if self._adapt else largest)

    def _wait(self, needed: int, count: int) -> None:
        """Waits until the arena could have ``needed`` bytes; an interrupt ends it."""
        runtime = self._runtime
        started = time.perf_counter()
        reports_after = FIRST_NOTICE_SECONDS
        while not runtime.wait_memory(needed, WAIT_SLICE_MS):
            # Not the sum of what each holds now: a chunk on its way from one to another would be missing.
            within_reach = runtime.reachable_bytes()
            if needed > within_reach:
                raise OutOfMemory(
                    f"a micro-batch of {count} samples needs more than the {within_reach} bytes that this job could "
                    f"have of the pool's {runtime.pool_bytes()}; lower micro_batch, or give the pool more memory\n"
                    f"{shortage(runtime)}"
                )
            if time.perf_counter() >= started + reports_after:
                reports_after += NOTICE_SECONDS if self._together else reports_after
                others = ", and other processes for it, which may be those that hold them" if self._together else ""
                print(f"sluice: a micro-batch of {count} samples waits for {needed} bytes{others}\n{shortage(runtime)}", file=sys.stderr,
                      flush=True)
        self.wait_seconds += time.perf_counter() - started
