"""Two processes that do the same work in turn, so that drift of the machine falls on both alike.

Both live all the time but only one runs at once: in turn each is told to make so many steps, which is a window; the
order within a pair of windows changes from pair to pair. What is compared is the median of the pairs' ratios; its
interval comes from resampling pairs.
"""

from __future__ import annotations

import json
import math
import random
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from demonstration.processes import Stage

WARM_UP_STEPS = 6
LIMIT_SECONDS = 600.0  # for one answer of a worker


def answer(step: Callable[[], None], settle: Callable[[], None], more: Callable[[], dict] = dict) -> None:
    """The process that is measured: reads numbers of steps from standard input; answers each with the seconds that they
    took, and with what `more` says then. `settle` waits for what has been started."""
    for line in sys.stdin:
        settle()
        started = time.perf_counter()
        for _ in range(int(line)):
            step()
        settle()
        print(json.dumps({"seconds": time.perf_counter() - started, **more()}), flush=True)


class Worker:
    """The other end of `answer`."""

    def __init__(self, stage: Stage, name: str, command: list) -> None:
        self._stage = stage
        self._process: subprocess.Popen = stage.start(name, command, captured=True, fed=True)

    def run(self, steps: int) -> dict:
        """Throws `Failed` if the process ends, or does not answer in time."""
        try:
            self._process.stdin.write(f"{steps}\n".encode())
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(LIMIT_SECONDS):
                    raise self._stage.failure(self._process, f"did not answer within {LIMIT_SECONDS:.0f} s")
            said = self._process.stdout.readline()
        except BrokenPipeError:
            said = b""
        if not said:
            raise self._stage.failure(self._process, f"ended with status {self._process.wait(LIMIT_SECONDS)}")
        return json.loads(said)


def in_turn(workers: dict[str, Worker], pairs: int, window: float) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Milliseconds of a step by worker and window of at least so many seconds, and the workers' last answers."""
    for worker in workers.values():
        worker.run(WARM_UP_STEPS)
    pace = max(worker.run(2)["seconds"] / 2 for worker in workers.values())
    steps = max(1, math.ceil(window / pace))
    ms: dict[str, list[float]] = {name: [] for name in workers}
    last: dict[str, dict] = {}
    for pair in range(pairs):
        for name in workers if pair % 2 == 0 else reversed(workers):
            last[name] = workers[name].run(steps)
            ms[name].append(last[name]["seconds"] / steps * 1e3)
    return ms, last


def interval(ratios: list[float], resamples: int = 4000) -> tuple[float, float]:
    """95 % bootstrap interval of the median of paired ratios."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
