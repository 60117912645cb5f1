"""The training that the jobs of memory's GPU tests do, and how they talk with their test.

    python JOB.py NAME UNTIL OUT

A job prints "ready" when handovers may begin, goes on until the file UNTIL appears, and writes what it saw to OUT as
JSON. It judges nothing: memory_gpu_test.py does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from jobs import Deep

import sluice

SAMPLES, WIDTH, DEPTH = 4096, 2048, 8  # some 0.8 GiB of activations
WARM_UP_STEPS = 5
MIB = 1 << 20
UNTIL, OUT = map(Path, sys.argv[2:4])


def ready() -> None:
    """Lets handovers begin."""
    print("ready", flush=True)


def run(*jobs: Callable[[], dict]) -> None:
    """Runs the one that the command line names."""
    OUT.write_text(json.dumps({job.__name__: job for job in jobs}[sys.argv[1]]()))


class Training:
    """A model of which every micro-batch fills the arena."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Deep(WIDTH, DEPTH).cuda()
        self.step = sluice.Step(self.model, torch.optim.SGD(self.model.parameters(), lr=1e-4), SAMPLES, adapt=False)
        assert self.step.shared
        self.x = torch.randn(SAMPLES, WIDTH, device="cuda")

    def plain_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def __call__(self, loss: Callable | None = None) -> float:
        return self.step(loss or self.plain_loss, self.x).item()

    def warm_up(self, loss: Callable | None = None) -> None:
        for _ in range(WARM_UP_STEPS):
            self(loss)

    def until_told(self, loss: Callable | None = None, after_each: Callable = lambda: None) -> None:
        ready()
        while not UNTIL.exists():
            self(loss)
            after_each()

    @property
    def discards(self) -> int:
        return self.step.stats()["discards"]


def is_rehearsal(x: torch.Tensor) -> bool:
    return len(x) != SAMPLES


def own_status() -> dict:
    """What `sluice status` has of this job."""
    done = subprocess.run([os.environ["SLUICE_BROKER"], "status", "--json"], capture_output=True, check=True)
    return next(client for client in json.loads(done.stdout)["clients"] if client["pid"] == os.getpid())
