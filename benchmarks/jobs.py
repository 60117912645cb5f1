"""Training jobs for benchmarks: `python jobs.py NAME …` trains until it is ended, through sluice.Step."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import sluice


class Deep(nn.Module):
    """Residual layers of one width; its activations are depth × samples × width × 4 bytes, twice (input and gelu)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4096)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Deep(args.width, args.depth).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = sluice.Step(model, optimizer, micro_batch=args.samples, adapt=False)
    x = torch.randn(args.samples, args.width, device=args.device)
    while True:
        step(lambda x: model(x).square().mean(), x)


if __name__ == "__main__":
    main()
