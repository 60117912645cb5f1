"""Training jobs for benchmarks: `python jobs.py …` trains until it is ended, through sluice.Step."""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Callable

import torch
from overhead_models import Job, gpt2_on_cuda, resnet50_on_cuda
from torch import nn


class Deep(nn.Module):
    """Residual layers of one width; its activations are depth × samples × width × 4 bytes, twice (input and gelu)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x


def deep(args: argparse.Namespace) -> Job:
    model = Deep(args.width, args.depth).to(args.device)
    x = torch.randn(args.samples, args.width, device=args.device)
    return Job(model, torch.optim.SGD(model.parameters(), lr=1e-4), (x,), lambda x: model(x).square().mean())


MODELS: dict[str, Callable[[argparse.Namespace], Job]] = {
    "deep": deep,
    "resnet50": lambda args: resnet50_on_cuda(args.samples),
    "gpt2": lambda args: gpt2_on_cuda(args.samples, layers=args.depth),
}


def compute_in_python(job: Job, until: float) -> None:
    count = 0
    while time.monotonic() < until:
        count += 1


def synchronize(job: Job, until: float) -> None:
    while time.monotonic() < until:
        torch.cuda.synchronize()


def load_data(job: Job, until: float) -> None:
    """Waits for a batch that a loader's thread has not ready yet."""
    ready: queue.Queue[None] = queue.Queue()
    threading.Timer(max(0.0, until - time.monotonic()), ready.put, [None]).start()
    ready.get()


def optimize(job: Job, until: float) -> None:
    while time.monotonic() < until:
        job.optimizer.step()


@torch.no_grad()
def evaluate(job: Job, until: float) -> None:
    while time.monotonic() < until:
        job.loss(*job.batch)


#: What the main thread does for a while; inside a micro-batch, or between two steps.
HABITS: dict[str, tuple[Callable[[Job, float], None], bool]] = {
    "python": (compute_in_python, True),
    "synchronize": (synchronize, True),
    "loader": (load_data, False),
    "optimizer": (optimize, False),
    "evaluation": (evaluate, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="deep")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16, help="layers of deep and gpt2")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--habit", choices=HABITS, help="what the main thread does in every step besides")
    parser.add_argument("--habit-seconds", type=float, default=0.2)
    args = parser.parse_args()
    import sluice  # there only under `sluice run`; who measures this job imports its list of habits

    torch.manual_seed(0)
    job = MODELS[args.model](args)
    habit, inside = HABITS.get(args.habit, (None, False))
    step = sluice.Step(job.model, job.optimizer, micro_batch=args.samples, adapt=False)

    def loss(*batch: torch.Tensor) -> torch.Tensor:
        value = job.loss(*batch)
        if habit and inside:
            habit(job, time.monotonic() + args.habit_seconds)
        return value

    while True:
        step(loss, *job.batch)
        if habit and not inside:
            habit(job, time.monotonic() + args.habit_seconds)


if __name__ == "__main__":
    main()
