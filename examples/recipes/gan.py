#!/usr/bin/env python3
"""A GAN: one step for each optimizer; each trains one of two models, and runs both.

    PYTHONPATH=runtime/python python examples/recipes/gan.py
    build/release/bin/sluice run -- python examples/recipes/gan.py
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sluice

NOISE, BATCH = 16, 64


def points_on_a_circle(count: int) -> torch.Tensor:
    angles = 2 * torch.pi * torch.rand(count)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def loss_of(logits: torch.Tensor, real: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a generator of points on a circle, against a discriminator.")
    parser.add_argument("--steps", type=int, default=500, help="of each of the two")
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(points_on_a_circle(1024)), batch_size=BATCH, shuffle=True)

    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    critic = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    generator_step = sluice.Step(generator, generator_optimizer, micro_batch=32)
    critic_step = sluice.Step(critic, critic_optimizer, micro_batch=32)

    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for (real,) in itertools.islice(epochs, options.steps):
        noise = torch.randn(BATCH, NOISE, device=device)
        with torch.no_grad():
            fake = generator(noise)
        critic_loss = critic_step(lambda real, fake: loss_of(critic(real), 1.0) + loss_of(critic(fake), 0.0),
                                  real.to(device), fake)
        critic.requires_grad_(False)        # the generator's step runs through it, and does not train it
        generator_loss = generator_step(lambda noise: loss_of(critic(generator(noise)), 1.0), noise)
        critic.requires_grad_(True)
    print(f"losses {generator_loss:.4f} and {critic_loss:.4f} after {options.steps} steps")

    if options.save:
        torch.save({"generator": generator.state_dict(), "critic": critic.state_dict(),
                    "optimizers": [generator_optimizer.state_dict(), critic_optimizer.state_dict()]}, options.save)


if __name__ == "__main__":
    main()
