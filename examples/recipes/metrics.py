#!/usr/bin/env python3
"""Metrics of training: the loss function returns values by name, and the step has them for the whole batch.

    PYTHONPATH=runtime/python python examples/recipes/metrics.py
    build/release/bin/sluice run -- python examples/recipes/metrics.py
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
    parser = argparse.ArgumentParser(description="Trains a classifier, and counts its right answers meanwhile.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = sluice.Step(model, optimizer, micro_batch=32)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> dict:
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "answers": logits.argmax(1), "spread": logits.std(1).mean()}

    table = torch.zeros(4, 4, dtype=torch.long)     # rows: what is right; columns: what was answered
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for x, y in itertools.islice(epochs, options.steps):
        loss = step(loss_of, x.to(device), y.to(device))
        # Outside of the loss function, which may run more than once for a sample.
        table.index_put_((y, step.values["answers"].cpu()), torch.ones_like(y), accumulate=True)
    print(f"loss {loss:.4f} after {options.steps} steps, {table.trace() / table.sum():.1%} of all answers right, "
          f"spread {step.values['spread']:.3f} in the last batch")

    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "table": table,
                    "values": step.values}, options.save)


if __name__ == "__main__":
    main()
