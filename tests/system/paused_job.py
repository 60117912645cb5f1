"""A small training job on the host that goes on until a file is there.

    sluice run … -- python paused_job.py UNTIL
"""

import sys
from pathlib import Path

import torch

import sluice

torch.set_num_threads(1)
model = torch.nn.Linear(16, 16)
step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch=8)
x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
while not Path(sys.argv[1]).exists():
    step(lambda x: model(x).square().mean(), x)
