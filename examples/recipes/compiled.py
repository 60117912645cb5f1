#!/usr/bin/env python3
"""torch.compile: the model is compiled before the step is made.

    PYTHONPATH=runtime/python python examples/recipes/compiled.py
    build/release/bin/sluice run -- python examples/recipes/compiled.py
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
    parser = argparse.ArgumentParser(description="Trains a classifier that torch.compile has compiled.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    # Batches and slices of one size are compiled once.
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Not mode="reduce-overhead" or "max-autotune": CUDA graphs replay on addresses whose memory may have gone.
    compiled = torch.compile(model)
    step = sluice.Step(compiled, optimizer, micro_batch=32)

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        loss = step(lambda x, y: F.cross_entropy(compiled(x), y), x.to(device), y.to(device))
    print(f"loss {loss:.4f} after {options.steps} steps")

    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)


if __name__ == "__main__":
    main()
