"""A training job of several processes, whose model is in DistributedDataParallel, there also with batch statistics of all, or
in shards, in replicas of shards, in parts of its linear layers ("tensors"), or in shards of such parts ("grid"). Shards may be of
blocks of layers that keep no activations ("checkpointed"), or are compiled. See exact_job.py for the rest of its command line.

What it writes is of all: their digests, the losses of the first, discards of each.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from exact_job import add_ending, digest, network
from exactness import KINDS, LAYERS
from ranks import forked, take_gpu
from torch import distributed, nn
from torch.distributed import checkpoint as checkpoint_files
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sluice

#: By device: the network's width, samples a step of even processes and of odd ones, and the most of them in a slice.
SIZES = {"cpu": (16, (80, 48), 32), "cuda": (64, (4096, 3072), 1024)}
SLICES = 4  # as many in each process, where they work together inside of micro-batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--kind", choices=KINDS, default="replicas")
    parser.add_argument("--layers", choices=LAYERS, default="plain")
    parser.add_argument("--first-gpu", type=int, default=0, help="the first process's (default %(default)s)")
    parser.add_argument("--through", type=Path, help="after each step what has been learned goes through a checkpoint in this folder")
    add_ending(parser)
    return parser.parse_args()


class Block(nn.Module):
    """Layers, one after another. A module of its own: torch.compile leaves those of torch alone."""

    def __init__(self, layers: list[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)


def in_blocks(model: nn.Sequential, layers: str, device: torch.device) -> nn.Module:
    """Shards of blocks that each begin with a convolution or a linear layer."""
    starts = [at for at, layer in enumerate(model) if isinstance(layer, (nn.Conv2d, nn.Linear))]
    ends = [*starts[1:], len(model)]
    blocks = [Block(list(model)[at:end], layers == "checkpointed") for at, end in zip(starts, ends, strict=True)]
    for block in blocks:
        if layers == "compiled":
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
        fully_shard(block)
    return fully_shard(nn.Sequential(*blocks))


def sharded(model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Module:
    """Convolutions and linear layers by themselves, and the rest."""
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parts(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Each process has half of what lies between the linear layers."""
    inner, outer = (str(at) for at, layer in enumerate(model) if isinstance(layer, nn.Linear))
    return parallelize_module(model, mesh, {inner: ColwiseParallel(), outer: RowwiseParallel()})


def wrapped(model: nn.Sequential, kind: str, layers: str, device: torch.device) -> nn.Module:
    """As training in several processes wants it."""
    if kind == "shards":
        return sharded(model) if layers == "plain" else in_blocks(model, layers, device)
    if layers != "plain":
        raise SystemExit(f"layers of {kind} are plain")
    if kind == "hybrid":
        return sharded(model, init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicas", "shards")))
    if kind == "tensors":
        return in_parts(model, init_device_mesh(device.type, (2,)))
    if kind == "grid":
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("shards", "parts"))
        return sharded(in_parts(model, mesh["parts"]), mesh["shards"])
    if kind == "synchronised":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return nn.parallel.DistributedDataParallel(model)


def go_through(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves both, spoils the weights, and loads what was saved."""
    def state() -> dict[str, Any]:
        weights, rest = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": rest}

    checkpoint_files.save(state(), checkpoint_id=folder)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    loaded = state()
    checkpoint_files.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def whole(param: nn.Parameter) -> torch.Tensor:
    return param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()


def train(args: argparse.Namespace, rank: int, meeting: str) -> None:
    """A rank's part, which finds the others at `meeting`."""
    width, samples, micro_batch = SIZES[args.device]
    device = torch.device(args.device)
    if args.device == "cuda":
        device = take_gpu(rank, KINDS[args.kind].ranks, args.first_gpu)
    distributed.init_process_group("nccl" if args.device == "cuda" else "gloo", init_method=f"file://{meeting}", rank=rank,
                                   world_size=KINDS[args.kind].ranks)
    copies = KINDS[args.kind].copies
    part = rank // copies  # of the samples
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = wrapped(network(width).to(device), args.kind, args.layers, device)
    count = samples[part % len(samples)]
    if args.kind != "replicas":
        micro_batch = count // SLICES
    # On GPUs torch would update many parameters in one call, which must then all be DTensors, or none.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False if args.kind == "tensors" else None)
    clip_norm = 1.0 if copies == 1 else None  # torch's clipping wants all parameters to be laid out alike
    step = sluice.Step(model, optimizer, micro_batch, adapt=False, clip_norm=clip_norm)
    torch.manual_seed(part)  # dropout is each part's own
    generator = torch.Generator(device).manual_seed(part)
    losses: list[torch.Tensor] = []
    over = False
    while not over:
        x = torch.randn(count, 3, 32, 32, generator=generator, device=device)
        y = torch.randint(10, (count,), generator=generator, device=device)
        losses.append(step(lambda x, y: F.cross_entropy(model(x), y), x, y))
        if args.through:
            go_through(args.through, model, optimizer)
        ending = torch.tensor(float(len(losses) == args.steps if args.steps else args.until.exists()), device=device)
        distributed.broadcast(ending, 0)
        over = bool(ending)
    own = {"digest": digest(model, optimizer), "losses": [loss.item().hex() for loss in losses], "stats": step.stats(),
           "shared": step.shared,
           "parameters": [hashlib.sha256(whole(param).cpu().numpy().tobytes()).hexdigest() for param in model.parameters()]}
    args.out.with_suffix(f".{rank}").write_text(json.dumps(own))
    distributed.destroy_process_group()


def main() -> None:
    run(arguments())


def run(args: argparse.Namespace) -> None:
    """Trains in all ranks. Raises SystemExit if one fails."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ended = forked(KINDS[args.kind].ranks, lambda rank, meeting: train(args, rank, meeting))
    if any(ended):
        raise SystemExit(f"the ranks have ended with {ended}")
    ranks = [json.loads(args.out.with_suffix(f".{rank}").read_text()) for rank in range(KINDS[args.kind].ranks)]
    first = ranks[0]
    assert all(each[key] == first[key] for each in ranks for key in ("losses", "parameters")), "the processes have parted"
    args.out.write_text(json.dumps({
        "digest": [each["digest"] for each in ranks], "losses": first["losses"], "steps": len(first["losses"]),
        "shared": all(each["shared"] for each in ranks), "phases": [(0, "training")],
        "stats": {"discards": [each["stats"]["discards"] for each in ranks]}}))


if __name__ == "__main__":
    main()
