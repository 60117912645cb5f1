"""The models whose training step overhead.py measures: each a factory of model, optimizer, batch and loss."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


@dataclass
class Job:
    model: Any
    optimizer: Any
    batch: tuple  # of tensors on the device, samples in dimension 0
    loss: Callable  # of slices of the batch; the mean over samples
    step: Callable[[], None] | None = None  # all of a step, for a job that has no micro-batches


@dataclass(frozen=True)
class Workload:
    name: str
    backend: str  # host or cuda
    batch: int
    micro_batches: int
    make: Callable[[int], Job]  # of the batch size
    packages: tuple[str, ...] = ()
    precision: str = "fp32"
    of_ranks: bool = False  # whether it is made by every rank of a process group

    @property
    def params(self) -> dict:
        return {"model": self.name, "batch": self.batch, "micro_batches": self.micro_batches,
                "precision": self.precision}


def plain_step(job: Job, micro_batches: int) -> Callable[[], Any]:
    """The usual loop: gradients accumulate over slices whose losses are weighted by their share. It returns the last one's."""
    total = len(job.batch[0])
    bounds = [total * i // micro_batches for i in range(micro_batches + 1)]

    def step() -> Any:
        job.optimizer.zero_grad(set_to_none=True)
        for start, stop in zip(bounds, bounds[1:]):
            loss = job.loss(*(each[start:stop] for each in job.batch))
            (loss if micro_batches == 1 else loss * ((stop - start) / total)).backward()
        job.optimizer.step()
        return loss.detach()

    return step


def charlm_on_cpu(batch: int) -> Job:
    import torch

    import charlm

    size = charlm.SIZES["cpu"]
    model = charlm.CharLM(size)
    excerpts = charlm.Excerpts(charlm.standard_library_text(), size.context, seed=0)
    return Job(model, torch.optim.AdamW(model.parameters()), excerpts.batch(batch),
               lambda x, y: charlm.loss_of(model, x, y))


def convnet_on_cpu(batch: int) -> Job:
    import torch
    import torch.nn.functional as F
    from torch import nn

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 16, 10))
    images, labels = torch.rand(batch, 3, 32, 32), torch.randint(10, (batch,))
    return Job(model, torch.optim.AdamW(model.parameters()), (images, labels),
               lambda x, y: F.cross_entropy(model(x), y))


def resnet50_on_cuda(batch: int) -> Job:
    import torch
    import torch.nn.functional as F
    import torchvision

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    images = torch.rand(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return Job(model, torch.optim.AdamW(model.parameters(), fused=True), (images, labels), loss)


def vit_on_cuda(batch: int) -> Job:
    """ViT-L/16."""
    import torch
    import torch.nn.functional as F
    import torchvision

    model = torchvision.models.vit_l_16().cuda()
    images = torch.rand(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (batch,), device="cuda")

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return Job(model, torch.optim.AdamW(model.parameters(), fused=True), (images, labels), loss)


def gpt2_on_cuda(batch: int, layers: int = 24) -> Job:
    """GPT-2 medium at 24 layers; more make its activations larger without making any kernel longer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=layers, n_head=16, use_cache=False)).cuda()
    tokens = torch.randint(50257, (batch, 1024), device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x, labels=x).loss

    return Job(model, torch.optim.AdamW(model.parameters(), fused=True), (tokens,), loss)


def gpt2_sharded_on_cuda(batch: int) -> Job:
    """GPT-2 XL in shards, a layer each; for a rank of a process group."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (*model.transformer.h, model):
        fully_shard(layer, mp_policy=policy)
    tokens = torch.randint(50257, (batch, 1024), device="cuda")
    return Job(model, torch.optim.AdamW(model.parameters(), fused=True), (tokens,), lambda x: model(x, labels=x).loss)


def gpt2_compiled_on_cuda(batch: int) -> Job:
    job = gpt2_on_cuda(batch)
    job.model.compile()
    return job


def gpt2_graph_on_cuda(batch: int) -> Job:
    """The whole step in one CUDA graph."""
    import torch

    job = gpt2_on_cuda(batch)
    job.optimizer = torch.optim.AdamW(job.model.parameters(), fused=True, capturable=True)

    def step() -> None:
        job.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):  # a cast that is cached is in no graph
            loss = job.model(*job.batch, labels=job.batch[0]).loss
        loss.backward()
        job.optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    job.step = graph.replay
    return job


WORKLOADS = {f"{each.backend}-{each.name}-{each.micro_batches}": each for each in (
    Workload("charlm", "host", 32, 1, charlm_on_cpu),
    Workload("charlm", "host", 32, 4, charlm_on_cpu),
    Workload("convnet", "host", 64, 1, convnet_on_cpu),
    Workload("resnet50", "cuda", 128, 1, resnet50_on_cuda, ("torchvision",), "bf16"),
    Workload("gpt2-medium", "cuda", 8, 1, gpt2_on_cuda, ("transformers",), "bf16"),
    Workload("gpt2-medium", "cuda", 8, 4, gpt2_on_cuda, ("transformers",), "bf16"),
    Workload("gpt2-xl-sharded", "cuda", 4, 1, gpt2_sharded_on_cuda, ("transformers",), "bf16", of_ranks=True),
    Workload("vit-l-16", "cuda", 64, 1, vit_on_cuda, ("torchvision",), "bf16"),
)}
