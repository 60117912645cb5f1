#!/usr/bin/env python3
"""Gradient accumulation: the loader gives the whole batch, and the step cuts it. Here in a loop that is written by hand.

    PYTHONPATH=runtime/python python examples/recipes/accumulation.py
    build/release/bin/sluice run -- python examples/recipes/accumulation.py
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sluice

MICRO_BATCH, ACCUMULATE = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Accumulates gradients over the slices of a batch.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=MICRO_BATCH * ACCUMULATE, shuffle=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = sluice.Step(model, optimizer, micro_batch=MICRO_BATCH)

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        for micro in step.micro_batches(x.to(device), y.to(device)):
            with micro as (x_slice, y_slice):
                micro.backward(F.cross_entropy(model(x_slice), y_slice))
        # The optimizer has run on the gradient of the whole batch: its mean over all samples.
    print(f"loss {step.loss:.4f} after {options.steps} steps, {step.stats()['commits']} micro-batches")

    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)


if __name__ == "__main__":
    main()
