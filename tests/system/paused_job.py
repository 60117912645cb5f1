"""A small training job on the host that goes on until a file is there. Each of its micro-batches has half of the rows.

    sluice run … -- python paused_job.py [ROWS] UNTIL
"""

import sys
from pathlib import Path

import torch

import sluice

torch.set_num_threads(1)
rows = int(sys.argv[1]) if len(sys.argv) > 2 else 16
model = torch.nn.Linear(16, 16)
step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch=rows // 2)
x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
while not Path(sys.argv[-1]).exists():
    step(lambda x: model(x).square().mean(), x)
