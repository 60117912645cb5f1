"""A rank of a job that trains a few steps. From the fourth on PyTorch raises where one would wait for the device."""

import os

import torch
from ranks import take_gpu
from torch import distributed, nn

import sluice


def main() -> None:
    device = take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device))
    step = sluice.Step(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(32, 64, device=device)
    for count in range(8):
        torch.cuda.set_sync_debug_mode("error" if count > 3 else "default")
        loss = step(lambda x: model(x).square().mean(), x)
    torch.cuda.set_sync_debug_mode("default")
    print(f"rank {distributed.get_rank()} {step.shared} {loss.isfinite().item()}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
