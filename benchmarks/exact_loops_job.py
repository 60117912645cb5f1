"""Training loops of six kinds, whose results can be compared bit by bit: what exactness.py's servers pause and disturb.

A kind differs from the others in what a pause or a demand may meet: operators inside of autograd's nodes (checkpoints, of both
kinds), operators that are long (recurrences), buffers that a forward pass changes (batch statistics, spectral norms), two models
with a step each, code that a compiler has made. It ends after --steps, or with the step in which the file --until appears, and
writes what exact_job.py writes to --out, and how long the longest operator of one more step took that nothing disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
import torch.nn.functional as F
from exact_job import add_ending, digest, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice


class Loop:
    """Models with a step each. `train` trains all of them once and returns their losses."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[sluice.Step] = []
        self.parts: list[tuple[nn.Module, torch.optim.Optimizer]] = []

    def step_of(self, model: nn.Module, **options) -> sluice.Step:
        model.to(self.device)
        self.parts.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
        # Gradients of smaller slices differ in rounding: a discard must not change their size.
        self.steps.append(sluice.Step(*self.parts[-1], adapt=False, **options))
        return self.steps[-1]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)

    def labels(self, *shape: int) -> torch.Tensor:
        return torch.randint(10, shape, device=self.device)

    def digest(self) -> str:
        return hashlib.sha256("".join(digest(*part) for part in self.parts).encode()).hexdigest()

    def train(self) -> list[torch.Tensor]:
        raise NotImplementedError


class Transformer(Loop):
    """Layers whose activations are computed again in the backward pass, inside of a node where that is `reentrant`; layers are
    dropped at random."""

    reentrant = True

    def __init__(self, device: str, scale: int) -> None:
        super().__init__(device)
        width = 128 * scale
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=True)
                  for _ in range(4)]
        self.model = nn.ModuleDict({"patches": nn.Conv2d(3, width, 8, 8), "layers": nn.ModuleList(layers),
                                    "head": nn.Linear(width, 10)})
        self.step = self.step_of(self.model, micro_batch=16, clip_norm=1.0)

    def loss(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = self.model["patches"](pictures).flatten(2).transpose(1, 2)
        for layer in self.model["layers"]:
            tokens = checkpoint(layer, tokens, use_reentrant=self.reentrant)
            tokens = tokens * (torch.rand(len(tokens), 1, 1, device=self.device) > 0.1)
        return F.cross_entropy(self.model["head"](tokens.mean(1)), labels)

    def train(self) -> list[torch.Tensor]:
        return [self.step(self.loss, self.random(48, 3, 64, 64), self.labels(48))]


class PlainlyCheckpointed(Transformer):
    reentrant = False


class Recurrent(Loop):
    """A few long operators; autocast in every other step."""

    def __init__(self, device: str, scale: int) -> None:
        super().__init__(device)
        self.model = nn.ModuleDict({"words": nn.Embedding(500, 128 * scale),
                                    "recurrence": nn.GRU(128 * scale, 256 * scale, 2, batch_first=True, dropout=0.2),
                                    "head": nn.Linear(256 * scale, 500)})
        self.step = self.step_of(self.model, micro_batch=16, clip_norm=0.5)
        self.half = False

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            hidden, _ = self.model["recurrence"](self.model["words"](words[:, :-1]))
            return F.cross_entropy(self.model["head"](hidden).float().flatten(0, 1), words[:, 1:].flatten())

    def train(self) -> list[torch.Tensor]:
        self.half = not self.half
        return [self.step(self.loss, torch.randint(500, (48, 41), device=self.device))]


class Convolutions(Loop):
    """Batch statistics, and pictures that the loss function turns at random."""

    def __init__(self, device: str, scale: int) -> None:
        super().__init__(device)
        width = 32 * scale
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.BatchNorm2d(2 * width), nn.ReLU(), nn.Dropout2d(0.1), nn.AvgPool2d(16), nn.Flatten(),
            nn.Linear(2 * width, 10))
        self.step = self.step_of(self.model, micro_batch=64)

    def loss(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        turned = pictures.flip(-1) if torch.rand(()) < 0.5 else pictures
        return F.cross_entropy(self.model(turned), labels, label_smoothing=0.1)

    def train(self) -> list[torch.Tensor]:
        return [self.step(self.loss, self.random(160, 3, 32, 32), self.labels(160))]


class Adversaries(Loop):
    """A generator and a critic, whose batch statistics both steps change."""

    def __init__(self, device: str, scale: int) -> None:
        super().__init__(device)
        width = 64 * scale
        self.generator = nn.Sequential(
            nn.Linear(64, width * 36), nn.Unflatten(1, (width, 6, 6)), nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 3, 3, 1, 1), nn.Tanh())
        self.critic = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, width, 4, 2, 1), nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(width * 36, 1))
        self.step_of_generator = self.step_of(self.generator, micro_batch=32)
        self.step_of_critic = self.step_of(self.critic, micro_batch=32)

    def judged(self, pictures: torch.Tensor, real: bool) -> torch.Tensor:
        judgement = self.critic(pictures)
        return F.binary_cross_entropy_with_logits(judgement, torch.full_like(judgement, float(real)))

    def train(self) -> list[torch.Tensor]:
        noise = self.random(64, 64)
        with torch.no_grad():
            made = self.generator(noise)
        of_critic = self.step_of_critic(lambda real, made: self.judged(real, True) + self.judged(made, False),
                                        self.random(64, 3, 24, 24), made)
        self.critic.requires_grad_(False)
        of_generator = self.step_of_generator(lambda noise: self.judged(self.generator(noise), True), noise)
        self.critic.requires_grad_(True)
        return [of_critic, of_generator]


class SpectralNorms(Loop):
    """Each forward pass iterates the vectors that its weights are divided by."""

    def __init__(self, device: str, scale: int) -> None:
        super().__init__(device)
        width = 1024 * scale
        normed = nn.utils.parametrizations.spectral_norm
        self.model = nn.Sequential(normed(nn.Linear(256, width)), nn.LeakyReLU(0.2), normed(nn.Linear(width, width)),
                                   nn.LeakyReLU(0.2), nn.Dropout(0.1), normed(nn.Linear(width, 10)))
        self.step = self.step_of(self.model, micro_batch=1024)

    def train(self) -> list[torch.Tensor]:
        return [self.step(lambda x, y: F.cross_entropy(self.model(x), y), self.random(3072, 256), self.labels(3072))]


class Compiled(Convolutions):
    def __init__(self, device: str, scale: int) -> None:
        super().__init__(device, scale)
        self.forward = torch.compile(self.model)

    def loss(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.forward(pictures), labels)


LOOPS = {"vit": PlainlyCheckpointed, "vit-reentrant": Transformer, "gru": Recurrent, "convolutions": Convolutions,
         "gan": Adversaries, "spectral-norm": SpectralNorms, "compiled": Compiled}


def longest_operator_us(loop: Loop) -> float:
    """Of one more step: on the processor, where a demand waits for the operator that it meets."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loop.train()
    return max(event.cpu_time_total for event in profile.events() if event.name.startswith("aten::"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, default=1, help="of the layers' widths")
    add_ending(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    loop = LOOPS[args.loop](args.device, args.scale)
    result = trained(args, lambda _: loop.train(), loop.steps, loop.digest)
    if not result["shared"]:
        result["longest_operator_us"] = longest_operator_us(loop)
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
