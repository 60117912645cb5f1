"""Trains a model with batch statistics, whose slices keep their size, for three steps; the more layers, the more memory they need.

    crowded_job.py LAYERS [--queue]

It begins when it is told to, by a line. With --queue the loss function writes 4 MiB outside of the model, of which each slice needs a copy.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

import sluice


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 10)
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for _ in range(self.layers):
            x = x + torch.sin(x) * 1e-3
        return self.last(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", type=int)
    parser.add_argument("--queue", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Deep(args.layers)
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), micro_batch=64)
    queue = torch.zeros(1024, 1024)
    x, y = torch.randn(128, 256), torch.randint(10, (128,))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if args.queue:
            with torch.no_grad():
                queue.add_(1.0)
        return F.cross_entropy(model(x), y)

    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        step(loss, x, y)
    print("done", step.stats(), flush=True)


if __name__ == "__main__":
    main()
