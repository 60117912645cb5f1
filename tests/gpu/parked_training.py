"""Training as people write it, which knows nothing of Sluice; writes its losses and how long it took as JSON.

    python parked_training.py MODE STEPS FILE [--fill GIB]

Modes: `gpt` (nanoGPT-like), `gpt-compiled`, `gpt-graph` (the whole step in a CUDA graph), `resnet` (half precision with a
gradient scaler), `trainer` (Hugging Face's), `cupy`, `jax`. `--fill` keeps so much memory besides, as a large model does.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
WRONG = "what was kept besides has changed"


def gpt(torch, mode: str, steps: int) -> list[float]:
    from torch import nn

    width, heads, layers, words, length, batch = 256, 4, 4, 512, 128, 16

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.mlp(self.second(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.head = nn.Linear(width, words)

        def forward(self, x, y):
            x = self.tokens(x) + self.places(torch.arange(length, device=x.device))
            return nn.functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), y.flatten())

    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=mode == "gpt-graph")
    forward = torch.compile(model) if mode == "gpt-compiled" else model
    data = torch.randint(words, (64, batch, length + 1), generator=torch.Generator().manual_seed(1))

    def step(x, y):
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=mode != "gpt-graph")
        return loss

    losses = []
    if mode != "gpt-graph":
        for number in range(steps):
            one = data[number % 64].cuda()
            losses.append(step(one[:, :-1], one[:, 1:]).item())
        return losses
    x, y = (torch.zeros(batch, length, dtype=torch.long, device="cuda") for _ in range(2))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step(x, y)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(x, y)
    for number in range(steps):
        x.copy_(data[number % 64][:, :-1])
        y.copy_(data[number % 64][:, 1:])
        graph.replay()
        losses.append(loss.item())
    return losses


def resnet(torch, steps: int) -> list[float]:
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    chance = torch.Generator().manual_seed(2)
    images = torch.rand(16, 32, 3, 64, 64, generator=chance)
    labels = torch.randint(10, (16, 32), generator=chance)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(images[number % 16].cuda()), labels[number % 16].cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def trainer(torch, steps: int) -> list[float]:
    import transformers

    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    chance = numpy.random.default_rng(3)
    rows = [{"input_ids": (row := chance.integers(256, size=64).tolist()), "labels": row} for _ in range(512)]
    with tempfile.TemporaryDirectory() as folder:
        wanted = transformers.TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=1, report_to=[],
                                                save_strategy="no", seed=4, disable_tqdm=True)
        job = transformers.Trainer(model, wanted, train_dataset=rows)
        job.train()
        return [entry["loss"] for entry in job.state.log_history if "loss" in entry]


def with_torch(mode: str, steps: int, fill: int) -> list[float]:
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = False
    # With warnings alone attention's backward pass would add in whatever order comes, and differ once in some thousand steps.
    torch.use_deterministic_algorithms(True)
    filled = torch.arange(fill // 8, device="cuda")
    before = filled.sum().item()
    found = resnet(torch, steps) if mode == "resnet" else trainer(torch, steps) if mode == "trainer" else gpt(torch, mode, steps)
    assert filled.sum().item() == before, WRONG
    return found


def numbers() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Weights and inputs."""
    chance = numpy.random.default_rng(5)
    return chance.standard_normal((512, 512), numpy.float32), chance.standard_normal((4096, 512), numpy.float32)


def cupy(steps: int, fill: int) -> list[float]:
    import cupy as cp

    filled = cp.arange(fill // 8, dtype=cp.int64)
    before = int(filled.sum())
    weights, inputs = map(cp.asarray, numbers())
    losses = []
    for _ in range(steps):
        outputs = inputs @ weights
        losses.append(float(cp.square(outputs).mean()))
        weights = weights - 1e-5 * (inputs.T @ outputs)
    assert int(filled.sum()) == before, WRONG
    return losses


def jax(steps: int, fill: int) -> list[float]:
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    import jax
    from jax import numpy as jnp

    def loss(weights, inputs):
        return jnp.square(jnp.tanh(inputs @ weights)).mean()

    @jax.jit
    def step(weights, inputs):
        value, slope = jax.value_and_grad(loss)(weights, inputs)
        return weights - 0.1 * slope, value

    def checksum(of) -> int:
        return int(jax.lax.reduce(of, numpy.int32(0), jax.lax.bitwise_xor, (0,)))

    assert jax.devices()[0].platform == "gpu", jax.devices()
    filled = jnp.arange(fill // 4, dtype=jnp.int32)
    before = checksum(filled)
    weights, inputs = map(jnp.asarray, numbers())
    losses = []
    for _ in range(steps):
        weights, value = step(weights, inputs)
        losses.append(float(value))
    assert checksum(filled) == before, WRONG
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("gpt", "gpt-compiled", "gpt-graph", "resnet", "trainer", "cupy", "jax"))
    parser.add_argument("steps", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--fill", type=float, default=0.0)
    chosen = parser.parse_args()
    fill = int(chosen.fill * (1 << 30))
    began = time.monotonic()
    others = {"cupy": cupy, "jax": jax}
    found = others[chosen.mode](chosen.steps, fill) if chosen.mode in others else with_torch(chosen.mode, chosen.steps, fill)
    chosen.file.write_text(json.dumps({"losses": found, "seconds": time.monotonic() - began}), encoding="utf-8")
