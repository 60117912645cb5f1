"""Trains until the file named first appears, then writes where its activations lay to the file named second.

A JSON object: `pid`, `seen`, a list of [generation of the arena, address], and `fault`, the message of a step that fails
as if CUDA had met an address without memory.
"""

import json
import os
import sys
from pathlib import Path

import torch

import sluice

until, out = map(Path, sys.argv[1:])
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=1e-3), micro_batch=2048)
seen = set()


def note(_module, _inputs, output):
    if len(output) > 2:  # the rehearsal's few samples lie outside the arena
        first = output.data_ptr()
        seen.update((step._runtime.generation(), at) for at in (first, first + output.nbytes - 1))


for layer in model:
    layer.register_forward_hook(note)
while not until.exists():
    step(lambda x: model(x).square().mean(), torch.ones(2048, 512))
assert step.shared


def faulting(x):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


try:
    step(faulting, torch.ones(2048, 512))
except RuntimeError as why:
    out.write_text(json.dumps({"pid": os.getpid(), "seen": sorted(seen), "fault": str(why)}))
