#!/usr/bin/env python3
"""Distillation: the loss function asks a teacher that is not trained.

    PYTHONPATH=runtime/python python examples/recipes/distillation.py
    build/release/bin/sluice run -- python examples/recipes/distillation.py
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sluice

TEMPERATURE = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small classifier to answer as a larger one.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    teacher = nn.Sequential(nn.Linear(20, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4)).to(device)
    teacher.eval().requires_grad_(False)        # as loaded from a checkpoint
    student = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    step = sluice.Step(student, optimizer, micro_batch=32)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = F.log_softmax(teacher(x) / TEMPERATURE, dim=1)
        logits = student(x)
        soft = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=1), target, reduction="batchmean", log_target=True)
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * TEMPERATURE**2 * soft

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        loss = step(loss_of, x.to(device), y.to(device))
    print(f"loss {loss:.4f} after {options.steps} steps")

    if options.save:
        torch.save({"teacher": teacher.state_dict(), "student": student.state_dict(),
                    "optimizer": optimizer.state_dict()}, options.save)


if __name__ == "__main__":
    main()
