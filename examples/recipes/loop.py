#!/usr/bin/env python3
"""A plain loop: the step stands for forward, backward, clipping, the optimizer and zero_grad.

    PYTHONPATH=runtime/python python examples/recipes/loop.py            plain PyTorch
    build/release/bin/sluice run -- python examples/recipes/loop.py      in the shared pool
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sluice


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier in a plain loop.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    step = sluice.Step(model, optimizer, micro_batch=32, clip_norm=1.0)

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        loss = step(lambda x, y: F.cross_entropy(model(x), y), x.to(device), y.to(device))
        scheduler.step()
    print(f"loss {loss:.4f} after {options.steps} steps")

    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)


if __name__ == "__main__":
    main()
