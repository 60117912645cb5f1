"""Training that knows nothing of Sluice, on the host, until a file is there or for some steps; then it prints its losses.

    sluice run … -- python unmodified_job.py STEPS [UNTIL COUNTED]

With UNTIL it goes on from the first step until that file is there, and writes the number of its steps into COUNTED.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

steps, *files = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(128, 256), torch.randint(10, (128,))
losses = []
while len(losses) < int(steps) or (files and not Path(files[0]).exists()):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
    if files:
        Path(files[1]).write_text(str(len(losses)))
print(json.dumps({"losses": losses, "knows": "sluice" in sys.modules, "device": str(x.device)}))
