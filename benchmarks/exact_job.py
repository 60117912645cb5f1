"""A training job whose result can be compared bit by bit, and which tells at what instants it did what.

Convolutions, batch statistics and dropout, so that a discard has buffers and random state to put back; the samples come
from a DataLoader, whose workers may be forked from the process that holds the arena. With --model one of the models of
overhead_models.py takes its place, in bfloat16 and on one batch. It ends after --steps, or with the step in which the
file --until appears, and writes one JSON object to --out: a digest of all weights, buffers, optimizer and random state,
every step's loss, the counts of `Step.stats`, how often the optimizer had run before it was known that the micro-batch
counts, in vain, and the phases as [begin_ns, name] on the monotonic clock. Only a job that is --hooked knows when its
optimizer runs; hooks keep the step from running it ahead.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import overhead_models
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import sluice
from exactness import WAYS
from sluice import _update


class Pictures(Dataset):
    """Random pictures of shape [3, 32, 32] with labels, cut from one tensor that workers inherit or are sent."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.noise = torch.randn(count + 3 * 32 * 32, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.noise[index : index + 3 * 32 * 32].reshape(3, 32, 32), self.labels[index]


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AvgPool2d(4),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width * 64, 512), nn.Tanh(), nn.Linear(512, 10),
    )


@dataclass
class Training:
    """What is trained, and on what: slices of `batches` go to `loss`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., torch.Tensor]
    batches: Iterable[tuple[torch.Tensor, ...]]
    options: dict = field(default_factory=dict)  # of the step


def convolutions(args: argparse.Namespace) -> Training:
    model = network(args.width).to(args.device)
    loader = DataLoader(Pictures(16 * args.batch), args.batch, shuffle=True, drop_last=True, num_workers=args.workers,
                        multiprocessing_context=args.start_method if args.workers else None,
                        persistent_workers=bool(args.workers) and args.start_method == "spawn")  # each imports torch
    epochs = (batch for _ in itertools.count() for batch in loader)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3),
                        lambda x, y: F.cross_entropy(model(x), y),
                        ((x.to(args.device), y.to(args.device)) for x, y in epochs))
    return in_way(training, args.way, args.device)


def in_way(training: Training, way: str, device: str) -> Training:
    """The same in one of `exactness.WAYS`."""
    model = training.model
    if way == "lbfgs":
        training.optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=2)
    elif way == "scaled":
        low, largest, change = (torch.float16, 24, 10) if device == "cuda" else (torch.bfloat16, 127, 20)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**largest, growth_interval=3, backoff_factor=2.0**-change,
                                      growth_factor=2.0**change)  # so that the first step overflows, and every fourth from there on
        training.loss = torch.autocast(device, low)(training.loss)
        training.options = {"scaler": scaler, "clip_norm": 1.0}
    elif way == "compiled":
        model.compile(backend="aot_eager")  # takes no compiler; in the loops of exact_loops_job.py one runs
    return training


def one_of(make: Callable[[int], overhead_models.Job]) -> Callable[[argparse.Namespace], Training]:
    def training(args: argparse.Namespace) -> Training:
        job = make(args.batch)
        # The backward pass of max pooling adds up in any order where channels come last.
        job.model.to(memory_format=torch.contiguous_format)
        for module in job.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return Training(job.model, job.optimizer, job.loss, itertools.repeat(tuple(x.contiguous() for x in job.batch)))

    return training


MODELS = {
    "convolutions": convolutions,
    "resnet50": one_of(overhead_models.resnet50_on_cuda),
    "gpt2-medium": one_of(overhead_models.gpt2_on_cuda),
    "vit-l-16": one_of(overhead_models.vit_on_cuda),
}


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> str:
    """SHA-256 over the bits of everything that training has changed."""
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    if scaler is not None:
        tensors += [torch.tensor(value) for value in scaler.state_dict().values()]
    if any(parameter.is_cuda for parameter in model.parameters()):
        tensors.append(torch.cuda.get_rng_state())
    tensors += [value for state in optimizer.state.values() for _, value in sorted(state.items())
                if isinstance(value, torch.Tensor)]
    result = hashlib.sha256()
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a tensor in shards
        result.update(own.detach().cpu().contiguous().numpy().tobytes())
    return result.hexdigest()


def add_ending(parser: argparse.ArgumentParser) -> None:
    """How a job is told when to end, and where what it has learned goes."""
    parser.add_argument("--steps", type=int)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--out", type=Path, required=True)


def trained(args: argparse.Namespace, train: Callable[[int], list[torch.Tensor]], steps: list[sluice.Step],
            digest_of: Callable[[], str]) -> dict:
    """Calls ``train``, with how often it has been, until the end that ``add_ending`` asks for; it returns the losses of all
    ``steps``. What becomes of the job, which tells of no phases."""
    losses: list[torch.Tensor] = []  # read at the end: reading waits for the device
    made, over = 0, False
    while not over:
        losses += train(made)
        made += 1
        over = made == args.steps if args.steps else args.until.exists()
    return {"digest": digest_of(), "losses": [loss.item().hex() for loss in losses], "steps": made,
            "shared": all(step.shared for step in steps),
            "stats": {name: sum(step.stats()[name] for step in steps) for name in steps[0].stats()}, "phases": [(0, "training")]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="convolutions")
    parser.add_argument("--way", choices=WAYS, default="adamw", help="of the small network")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--hooked", action="store_true")
    add_ending(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    # PyTorch warns of pooling whatever its layout.
    torch.use_deterministic_algorithms(True, warn_only=args.model == "resnet50")
    training = MODELS[args.model](args)
    optimizer = training.optimizer
    # Gradients of smaller slices differ in rounding: a discard must not change their size.
    step = sluice.Step(training.model, optimizer, micro_batch=args.micro_batch, adapt=False, **training.options)

    phases: list[tuple[int, str]] = []

    def enter(phase: str) -> None:
        phases.append((time.monotonic_ns(), phase))

    def loss_of(*slices: torch.Tensor) -> torch.Tensor:
        enter("forward")
        loss = training.loss(*slices)
        enter("backward")
        return loss

    # The first layer's weight is the last to get its gradient; what follows is the commit.
    next(training.model.parameters()).register_post_accumulate_grad_hook(lambda _: enter("commit"))
    if args.hooked:
        optimizer.register_step_pre_hook(lambda *_: enter("optimizer"))
    in_vain = 0
    put_back = _update.HostState.put_back

    def count_and_put_back(state: _update.HostState) -> None:
        nonlocal in_vain
        in_vain += 1
        put_back(state)

    _update.HostState.put_back = count_and_put_back

    losses: list[torch.Tensor] = []  # read at the end: reading waits for the device
    for batch in training.batches:
        losses.append(step(loss_of, *batch))
        enter("between steps")
        if len(losses) == args.steps if args.steps else args.until.exists():
            break
    args.out.write_text(json.dumps({
        "digest": digest(training.model, optimizer, training.options.get("scaler")),
        "losses": [loss.item().hex() for loss in losses], "steps": len(losses),
        "shared": step.shared, "stats": step.stats(), "in_vain": in_vain, "phases": phases}))


if __name__ == "__main__":
    main()
