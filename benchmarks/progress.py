"""How far a training job has come (beside_job.py), between any two instants.

The job writes a line for each step: the instants (monotonic nanoseconds) at which parts of it ended, the step's own last.
How much of a step each part is, is seen where nothing else runs (`shares`); between two instants of a line the work is
taken to be even. So a step that began before a measurement, or ends after it, counts for what lies within. A line `- INSTANT`
says that nothing was done from the step before it until then.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from demonstration.processes import Failed

LOOK_EVERY_S = 0.02


class Progress:
    """What the job has written so far."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0
        self.steps: list[list[int]] = []
        self._rests: list[tuple[int, int]] = []  # how many steps were done before, and the instant of its end

    def look(self) -> list[list[int]]:
        if self._file.exists():
            with self._file.open("rb") as opened:
                opened.seek(self._read)
                whole = opened.read().rpartition(b"\n")[0]
            if whole:
                self._read += len(whole) + 1
                for line in whole.split(b"\n"):
                    first, *more = line.split()
                    if first == b"-":
                        self._rests.append((len(self.steps), int(more[0])))
                    else:
                        self.steps.append([int(word) for word in (first, *more)])
        return self.steps

    def wait(self, enough: Callable[[list[list[int]]], bool], status: Callable[[], int | None], seconds: float) -> None:
        """Until what was written is enough; `status` is the job's end. Raises Failed."""
        deadline = time.monotonic() + seconds
        while not ((steps := self.look()) and enough(steps)):
            if (ended := status()) is not None:
                raise Failed(f"training ended with {ended}")
            if time.monotonic() > deadline:
                raise Failed(f"training has made {len(steps)} steps, not enough within {seconds:.0f} s")
            time.sleep(LOOK_EVERY_S)

    def wait_beyond(self, instant: int, status: Callable[[], int | None], seconds: float) -> None:
        self.wait(lambda steps: steps[-1][-1] > instant, status, seconds)

    def shares(self, began: int, ended: int) -> list[float]:
        """How much of a step is done at each of its instants, seen between two instants; of as many as most steps have."""
        count = statistics.mode(len(step) for step in self.steps)
        seen = []
        for before, step in zip(self.steps, self.steps[1:]):
            if len(step) == count and began <= before[-1] and step[-1] <= ended:
                seen.append([(instant - before[-1]) / (step[-1] - before[-1]) for instant in step])
        return [statistics.median(at) for at in zip(*seen)] if seen else [1.0]

    def rate(self, began: int, ended: int, shares: list[float]) -> float:
        """Steps a second between two instants; the job must have gone beyond the second."""
        instants, done = [], []
        rests = dict(self._rests)
        for number, step in enumerate(self.steps):
            if number in rests:
                instants.append(rests[number])
                done.append(float(number))
            parts = zip(step, shares) if len(step) == len(shares) else [(step[-1], 1.0)]
            for instant, share in parts:
                if not instants or instant > instants[-1]:
                    instants.append(instant)
                    done.append(number + share)

        def at(instant: int) -> float:
            place = bisect.bisect(instants, instant)
            if place == 0 or place == len(instants):
                raise Failed("training was not there all the time")
            first, last = instants[place - 1], instants[place]
            return done[place - 1] + (done[place] - done[place - 1]) * (instant - first) / (last - first)

        return (at(ended) - at(began)) / (ended - began) * 1e9
