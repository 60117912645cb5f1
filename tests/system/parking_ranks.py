"""A training script of several ranks, as torchrun starts it; knows nothing of Sluice unless it is to use its step.

    torchrun … parking_ranks.py ddp|fsdp|step-ddp|step-fsdp STEPS KEEP_MIB FOLDER TIMEOUT_S cpu|cuda|nccl

Over gloo with all ranks on the host (`cpu`) or on one GPU (`cuda`); over NCCL each has a GPU of its own.

Each rank writes FOLDER/rank-N.json: its losses, bit by bit, and a digest of what it has of the parameters. Rank 0 prints "step N".
"""

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

if sys.argv[1].startswith("step"):
    import sluice

kind, steps, keep_mib, folder, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[6]
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
if device == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if device != "cpu":
    device = f"cuda:{torch.cuda.current_device()}"
    torch.set_default_device(device)
dist.init_process_group("nccl" if sys.argv[6] == "nccl" else "gloo", timeout=timedelta(seconds=int(sys.argv[5])))
rank = dist.get_rank()
torch.manual_seed(1)
kept = torch.randint(0, 256, (keep_mib << 20,), dtype=torch.uint8)
digest = hashlib.sha256(kept.cpu().numpy()).hexdigest()
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16))
if kind.endswith("ddp"):
    model = DistributedDataParallel(model)
else:
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator(device).manual_seed(100 + rank)
if kind.startswith("step"):
    sluice_step = sluice.Step(model, optimizer, micro_batch=16, adapt=False)


def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if kind.startswith("step"):
        return sluice_step(lambda x, y: nn.functional.mse_loss(model(x), y), inputs, targets)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


losses = []
for step in range(steps):
    loss = train(torch.randn(64, 256, generator=generator), torch.randn(64, 16, generator=generator))
    losses.append(loss.item().hex())
    if rank == 0:
        print(f"step {step}", flush=True)
own = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
parameters = hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in own)).hexdigest()
(folder / f"rank-{rank}.json").write_text(json.dumps({"losses": losses, "parameters": parameters,
                                                     "kept": hashlib.sha256(kept.cpu().numpy()).hexdigest() == digest}), encoding="utf-8")
dist.destroy_process_group()
