"""What a process's own part of a step takes."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """How long a process's own micro-batches take, without what it then waits for others; on a GPU, on the device."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._began = 0.0
        self._seconds = 0.0
        self.is_on = False

    def start(self) -> None:
        if self.is_on:
            self._await_device()
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self.is_on:
            self._await_device()
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """The seconds since it was last called."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _await_device(self) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()
