"""Training loops whose loss functions change what lies outside of the step's model."""

import copy

import torch
import torch.nn.functional as F
from scripted_runtime import ScriptedRuntime, sharing
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sluice


def network(inputs: int = 6, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Case:
    """One loop. `make` gives the state that it changes, `step` trains once."""

    micro_batch = 5

    def make(self) -> None:
        self.model = network()
        self.optimizer = adam(self.model)
        self.shared = sluice.Step(self.model, self.optimizer, self.micro_batch)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def step(self, x, y) -> None:
        self.shared(self.loss, x, y)

    def state(self) -> list:
        """Of everything, in plain values."""
        found = []
        for value in vars(self).values():
            if isinstance(value, nn.Module):
                found += [*value.parameters(), *value.buffers()]
            elif isinstance(value, torch.optim.Optimizer):
                found += [each for state in value.state.values() for each in state.values()]
            elif isinstance(value, torch.Tensor):
                found.append(value)
        tensors = [each for each in found if isinstance(each, torch.Tensor)]
        return [*(each.detach().flatten().tolist() for each in tensors), torch.get_rng_state().tolist()]


class Gan(Case):
    """Two steps, each of which runs the other's model."""

    def make(self):
        self.generator, self.critic = network(3, 6), network(6, 1)
        self.of_generator, self.of_critic = adam(self.generator), adam(self.critic)
        self.learns_to_make = sluice.Step(self.generator, self.of_generator, self.micro_batch)
        self.learns_to_judge = sluice.Step(self.critic, self.of_critic, self.micro_batch)

    def judged(self, x, real):
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), float(real)))

    def step(self, x, y):
        noise = torch.randn(len(x), 3)
        with torch.no_grad():
            made = self.generator(noise)
        self.learns_to_judge(lambda real, made: self.judged(real, True) + self.judged(made, False), x, made)
        self.critic.requires_grad_(False)
        self.learns_to_make(lambda noise: self.judged(self.generator(noise), True), noise)
        self.critic.requires_grad_(True)


class GanByHand(Gan):
    def step(self, x, y):
        noise = torch.randn(len(x), 3)
        for micro in self.learns_to_judge.micro_batches(x, noise):
            with micro as (real, noise_of_slice):
                with torch.no_grad():
                    made = self.generator(noise_of_slice)
                micro.backward(self.judged(real, True) + self.judged(made, False))
        self.critic.requires_grad_(False)
        for micro in self.learns_to_make.micro_batches(noise):
            with micro as noise_of_slice:
                micro.backward(self.judged(self.generator(noise_of_slice), True))
        self.critic.requires_grad_(True)


class GanThatStartsLater(Gan):
    """The loss function of the later steps is another one."""

    def make(self):
        super().make()
        self.steps = 0

    def step(self, x, y):
        self.steps += 1
        if self.steps > 2:
            return super().step(x, y)
        self.learns_to_make(lambda noise: self.generator(noise).square().mean(), torch.randn(len(x), 3))


class SpectralGan(Gan):
    """Norms of weights, taken by iteration."""

    def make(self):
        super().make()
        norm = nn.utils.parametrizations.spectral_norm
        self.critic = nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))
        self.of_critic = adam(self.critic)
        self.learns_to_judge = sluice.Step(self.critic, self.of_critic, self.micro_batch)


class Distillation(Case):
    """From a teacher that trains: batch statistics and dropout."""

    def make(self):
        self.teacher = network().requires_grad_(False)
        super().make()

    def loss(self, x, y):
        return F.kl_div(self.model(x).log_softmax(1), self.teacher(x).softmax(1), reduction="batchmean")


class AverageInside(Case):
    """An average of the weights that the loss function updates."""

    def make(self):
        super().make()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)

    def loss(self, x, y):
        self.average.update_parameters(self.model)
        return super().loss(x, y)


class AverageByHand(Case):
    def make(self):
        super().make()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, x, y):
        with torch.no_grad():
            for mine, its in zip(self.average.parameters(), self.model.parameters()):
                mine.lerp_(its, 0.1)
        return super().loss(x, y) + (self.average(x) - self.model(x)).square().mean()


class SharedTrunk(Case):
    """Two models with one trunk, which both steps train, in turns."""

    def make(self):
        self.trunk = network(6, 8)
        self.first, self.second = nn.Sequential(self.trunk, nn.Linear(8, 4)), nn.Sequential(self.trunk, nn.Linear(8, 4))
        self.of_first, self.of_second = adam(self.first), adam(self.second)
        self.steps = [sluice.Step(self.first, self.of_first, 5), sluice.Step(self.second, self.of_second, 5)]

    def step(self, x, y):
        self.steps[0](lambda x, y: F.cross_entropy(self.first(x), y), x, y)
        self.steps[1](lambda x, y: F.cross_entropy(self.second(x), y), x, y)


class Statistics(Case):
    """Batch statistics that belong to no module."""

    def make(self):
        super().make()
        self.mean, self.variance = torch.zeros(6), torch.ones(6)

    def loss(self, x, y):
        return super().loss(F.batch_norm(x, self.mean, self.variance, training=True), y)


class Norm(Case):
    """A module that is no part of the model."""

    def make(self):
        super().make()
        self.norm = nn.BatchNorm1d(6, affine=False)

    def loss(self, x, y):
        return super().loss(self.norm(x), y)


class InstanceNorm(Norm):
    def make(self):
        super().make()
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def loss(self, x, y):
        return Case.loss(self, self.norm(x[..., None].expand(-1, -1, 3)).mean(2), y)


class Counter(Case):
    def make(self):
        super().make()
        self.count, self.places = torch.zeros((), dtype=torch.int64), torch.zeros(3, 6)

    def loss(self, x, y):
        self.count += len(x)
        self.places[1].add_(x.detach().mean(0))
        torch.add(self.places[2], x.detach().sum(0), out=self.places[2])
        return super().loss(x, y)


class Queue(Case):
    """A queue of past outputs, as contrastive learning keeps."""

    def make(self):
        super().make()
        self.queue, self.place = torch.zeros(16, 4), torch.zeros((), dtype=torch.int64)

    def loss(self, x, y):
        output = self.model(x)
        self.queue.index_copy_(0, (self.place + torch.arange(len(x))) % 16, output.detach())
        self.place.add_(len(x)).remainder_(16)
        return F.cross_entropy(output, y) + (output @ self.queue.T.clone()).square().mean()


class Replacing(nn.Module):
    """Binds its buffer anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Replaced(Norm):
    def make(self):
        super().make()
        self.norm = Replacing()


class Masked(Case):
    """The loss function writes into its slice."""

    def loss(self, x, y):
        x[torch.rand(x.shape) < 0.3] *= 0.5
        x.add_(1)
        return super().loss(x, y)

    def step(self, x, y):
        super().step(x, y)
        self.seen = x  # as the loss function has left it


class Renormalised(Case):
    """Forward writes into the model's own weights."""

    def make(self):
        super().make()
        self.model = nn.Sequential(nn.Embedding(6, 8, max_norm=0.1, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(48, 4))
        self.optimizer = adam(self.model)
        self.shared = sluice.Step(self.model, self.optimizer, self.micro_batch)

    def step(self, x, y):
        super().step(x.abs().mul(10).long() % 6, y)


class Closure(Distillation):
    def make(self):
        super().make()
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=2, history_size=2)
        self.shared = sluice.Step(self.model, self.optimizer, self.micro_batch)


class AnotherEachTime(Case):
    """A module that the loss function makes, buffers and all."""

    def loss(self, x, y):
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return weighted(self.model(nn.BatchNorm1d(6)(x).detach()), y) + torch.tensor([1.0]).add_(1).sum()


class KeptGradients(Case):
    """A module with gradients of its own, to which backward adds."""

    def make(self):
        super().make()
        self.other = nn.Linear(6, 6)
        self.other(torch.ones(1, 6)).sum().backward()

    def loss(self, x, y):
        return super().loss(self.other(x), y)

    def state(self):
        return [*super().state(), *(param.grad.tolist() for param in self.other.parameters())]


CASES = [Case, Gan, GanByHand, GanThatStartsLater, SpectralGan, Distillation, AverageInside, AverageByHand, SharedTrunk,
         Statistics, Norm, InstanceNorm, Counter, Queue, Replaced, Masked, Renormalised,
         AnotherEachTime, KeptGradients, Closure]


def train(case: type[Case], runtime: ScriptedRuntime | None) -> list:
    torch.manual_seed(3)
    with sharing(runtime):
        made = case()
        made.make()
    for samples in (12, 12, 7, 12):
        made.step(torch.randn(samples, 6), torch.randint(4, (samples,)))
    return made.state()
