#!/usr/bin/env python3
"""An exponential moving average of the weights, updated after each step, and used by the loss function as a target.

    PYTHONPATH=runtime/python python examples/recipes/ema.py
    build/release/bin/sluice run -- python examples/recipes/ema.py
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import sluice


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier that is to agree with its own average.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    average.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = sluice.Step(model, optimizer, micro_batch=32)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(logits, y) + 0.1 * F.mse_loss(logits, average(x))

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        loss = step(loss_of, x.to(device), y.to(device))
        average.update_parameters(model)        # once a step, so not in the loss function
    print(f"loss {loss:.4f} after {options.steps} steps")

    if options.save:
        torch.save({"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()},
                   options.save)


if __name__ == "__main__":
    main()
