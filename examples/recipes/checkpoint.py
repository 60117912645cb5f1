#!/usr/bin/env python3
"""A checkpoint in the middle of an epoch, from which another process goes on as if nothing had been.

    PYTHONPATH=runtime/python python examples/recipes/checkpoint.py --steps 50 --save half.pt
    build/release/bin/sluice run -- python examples/recipes/checkpoint.py --resume half.pt --steps 100 --save whole.pt
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sluice

BATCH = 64


def batches(samples: TensorDataset, done: int) -> Iterator:
    """Of all epochs, without those that are done: the order of an epoch follows from its number alone."""
    epoch, of_epoch = divmod(done, len(samples) // BATCH)
    while True:
        own = torch.Generator().manual_seed(epoch)      # else each beginning of an epoch draws from the common one
        order = torch.randperm(len(samples), generator=own)[of_epoch * BATCH:]
        yield from DataLoader(samples, BATCH, sampler=order.tolist(), drop_last=True, generator=own)
        epoch, of_epoch = epoch + 1, 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier, and goes on with it in another process.")
    parser.add_argument("--steps", type=int, default=200, help="in all")
    parser.add_argument("--save", type=Path, help="write a checkpoint there")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    random.seed(0)

    x = torch.randn(1024, 20)
    samples = TensorDataset(x, (x @ torch.randn(20, 4)).argmax(1))
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    done = 0
    if options.resume:
        state = torch.load(options.resume, map_location=device, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        random.setstate(state["random"][0])
        torch.set_rng_state(state["random"][1].cpu())
        if device == "cuda":
            torch.cuda.set_rng_state(state["random"][2].cpu())
        done = state["done"]

    step = sluice.Step(model, optimizer, micro_batch=32)        # keeps nothing that belongs into a checkpoint
    for x, y in batches(samples, done):
        loss = step(lambda x, y: F.cross_entropy(model(x), y), x.to(device), y.to(device))
        scheduler.step()
        done += 1
        if done >= options.steps:
            break
    print(f"loss {loss:.4f} after {done} steps")

    if options.save:
        states = [random.getstate(), torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "random": states, "done": done}, options.save)


if __name__ == "__main__":
    main()
