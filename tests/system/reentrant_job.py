"""A training job on the host that spends its time in backward passes inside of a backward pass, until a file is there.

    sluice run … -- python reentrant_job.py UNTIL
"""

import sys
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import sluice

LAYERS = 400

torch.set_num_threads(1)
weight = torch.nn.Linear(256, 256)


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        x = torch.tanh(x)
    return x


step = sluice.Step(weight, torch.optim.SGD(weight.parameters(), lr=0.01))
x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
while not Path(sys.argv[1]).exists():
    step(lambda x: checkpoint(chain, weight(x), use_reentrant=True).square().mean(), x)
