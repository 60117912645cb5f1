"""A rank of a job whose ranks have different numbers of samples: replicas, then shards, then on each GPU by itself a model that has
all samples. Prints by how much the weights of the first two differ from the third's at most."""

import os

import torch
from ranks import take_gpu
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import sluice

STEPS = 5
PARTS = (40, 24)
SLICES = 4


def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double().to(device)


def trained(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), -(-len(x) // SLICES), adapt=False,
                       clip_norm=1.0)
    assert step.shared
    for _ in range(STEPS):
        step(lambda x, y: nn.functional.cross_entropy(module(x), y), x, y)
    return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in module.parameters()]


def main() -> None:
    device = take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    distributed.init_process_group("nccl")
    rank = distributed.get_rank()
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(sum(PARTS), 16, dtype=torch.double, device=device, generator=generator)
    y = torch.randint(4, (sum(PARTS),), device=device, generator=generator)
    part = slice(0, PARTS[0]) if rank == 0 else slice(PARTS[0], None)
    sharded = model(device)
    for layer in (*(layer for layer in sharded if isinstance(layer, nn.Linear)), sharded):
        fully_shard(layer)
    several = [trained(nn.parallel.DistributedDataParallel(model(device)), x[part], y[part]), trained(sharded, x[part], y[part])]
    alone = trained(model(device), x, y)
    worst = max((a - b).abs().max().item() for weights in several for a, b in zip(weights, alone, strict=True))
    print(f"rank {rank} {worst}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
