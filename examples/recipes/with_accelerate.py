#!/usr/bin/env python3
"""A loop of Hugging Face's accelerate: two lines of it are other ones.

    PYTHONPATH=runtime/python python examples/recipes/with_accelerate.py
    build/release/bin/sluice run -- python examples/recipes/with_accelerate.py
    build/release/bin/sluice run -- accelerate launch --num_processes 2 examples/recipes/with_accelerate.py
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sluice.integrations.accelerate import share


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier in a loop of accelerate's.")
    parser.add_argument("--steps", type=int, default=200, help="batches")
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    forward_backward = share(accelerator, model, optimizer, micro_batch=32)     # this one is new

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        with accelerator.accumulate(model):
            # And this one stands for accelerator.backward(F.cross_entropy(model(x), y)).
            loss = forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss:.4f} after {options.steps} batches")

    if options.save:
        accelerator.save({"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()},
                         options.save)


if __name__ == "__main__":
    main()
