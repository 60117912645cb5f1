"""A training job whose loss functions change state outside of the step's model; see benchmarks/exact_job.py for its command line.

    outside_job.py --way adversarial | distillation | average | trunk …

Every model has batch statistics and dropout. The digest is over all models and all optimizers.
"""

import argparse
import copy
import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sluice

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from exact_job import add_ending, digest, trained  # noqa: E402

BATCH, MICRO_BATCH, SIDE, WIDTH, CODE = 48, 20, 16, 24, 32


def network(channels: int, outputs: int) -> nn.Module:
    """From pictures of shape [channels, SIDE, SIDE]."""
    return nn.Sequential(
        nn.Conv2d(channels, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.1),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(2 * WIDTH * (SIDE // 4) ** 2, outputs))


class Way:
    """One way to train: its models, their optimizers, and what it does with a batch."""

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.steps: list[sluice.Step] = []

    def step_of(self, model: nn.Module) -> sluice.Step:
        self.optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.steps.append(sluice.Step(model, self.optimizers[-1], MICRO_BATCH, adapt=False))
        return self.steps[-1]

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def digest(self) -> str:
        parts = [digest(nn.ModuleDict(self.models), each) for each in self.optimizers]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


class Adversarial(Way):
    """A generator and a critic, which judges as the loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(CODE, WIDTH * SIDE * SIDE), nn.Unflatten(1, (WIDTH, SIDE, SIDE)), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.Conv2d(WIDTH, 3, 3, padding=1), nn.Tanh())
        self.critic = network(3, 1)
        self.models = {"generator": self.generator, "critic": self.critic}
        self.learns_to_make, self.learns_to_judge = self.step_of(self.generator), self.step_of(self.critic)

    def judged(self, x: torch.Tensor, real: bool) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), float(real)))

    def train(self, x, y):
        with torch.no_grad():
            made = self.generator(torch.randn(len(x), CODE))
        first = self.learns_to_judge(lambda real, made: self.judged(real, True) + self.judged(made, False), x, made)
        self.critic.requires_grad_(False)
        second = self.learns_to_make(lambda code: self.judged(self.generator(code), True), torch.randn(len(x), CODE))
        self.critic.requires_grad_(True)
        return first + second


class Distillation(Way):
    """From a teacher in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = network(3, 10).requires_grad_(False), network(3, 10)
        self.models = {"teacher": self.teacher, "student": self.student}
        self.learns = self.step_of(self.student)

    def train(self, x, y):
        return self.learns(lambda x, y: F.cross_entropy(self.student(x), y) + F.kl_div(
            self.student(x).log_softmax(1), self.teacher(x).softmax(1), reduction="batchmean"), x, y)


class Average(Way):
    """An average of the weights, updated inside of the loss function, which teaches too, and a count of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network(3, 10)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)
        self.models = {"model": self.model, "average": self.average}
        self.count = torch.zeros((), dtype=torch.int64)
        self.learns = self.step_of(self.model)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.average.update_parameters(self.model)
        self.count += len(x)
        output = self.model(x)
        return F.cross_entropy(output, y) + (output - self.average(x)).square().mean()

    def train(self, x, y):
        return self.learns(self.loss, x, y)

    def digest(self):
        return f"{super().digest()} {self.count.item()}"


class Trunk(Way):
    """Two heads on one trunk, trained in turns; each is a step's model."""

    def __init__(self) -> None:
        super().__init__()
        trunk = network(3, 64)
        self.heads = [nn.Sequential(trunk, nn.Linear(64, outputs)) for outputs in (10, 3)]
        self.frozen = copy.deepcopy(self.heads[0]).requires_grad_(False)
        self.models = {"first": self.heads[0], "second": self.heads[1], "frozen": self.frozen}
        self.turns = [self.step_of(head) for head in self.heads]

    def train(self, x, y):
        first = self.turns[0](lambda x, y: F.cross_entropy(self.heads[0](x), y), x, y)
        return first + self.turns[1](lambda x, y: F.cross_entropy(self.heads[1](x), y) + self.frozen(x).square().mean(), x, y % 3)


WAYS = {"adversarial": Adversarial, "distillation": Distillation, "average": Average, "trunk": Trunk}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    add_ending(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    way = WAYS[args.way]()
    pictures = torch.randn(16 * BATCH, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(10, (16 * BATCH,), generator=torch.Generator().manual_seed(2))

    def train(made: int) -> list[torch.Tensor]:
        place = made * BATCH % len(pictures)
        return [way.train(pictures[place:][:BATCH], labels[place:][:BATCH])]

    args.out.write_text(json.dumps(trained(args, train, way.steps, way.digest)))


if __name__ == "__main__":
    main()
