"""A training job that uses what the step offers beside the plain call; see benchmarks/exact_job.py for its command line.

    step_job.py --way by-hand | closure | recompute …

Its network branches, so that backward has several nodes ready when it is interrupted.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sluice

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from exact_job import digest  # noqa: E402

BATCH, MICRO_BATCH, LENGTH, WIDTH, WORDS = 48, 20, 64, 64, 50


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.again = {1}  # blocks whose activations are computed again in backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index in self.again else block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("by-hand", "closure", "recompute"), required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.use_deterministic_algorithms(True)
    model = Model()
    own = random.Random(1)
    if args.way == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=2)
        step = sluice.Step(model, optimizer, MICRO_BATCH, generators=[own], adapt=False)
    elif args.way == "recompute":
        def switch(again: bool) -> None:
            model.again = {0, 1, 2} if again else set()

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = sluice.Step(model, optimizer, MICRO_BATCH, generators=[own], adapt=False, recompute=switch)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = sluice.Step(model, optimizer, MICRO_BATCH, generators=[own], adapt=False, clip_norm=1.0,
                           scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3))

    def loss_of(x: torch.Tensor, y: torch.Tensor):
        kept = torch.rand(y.shape) < 0.5 + 0.2 * own.random() + 0.2 * random.random()
        labels = torch.where(kept, y, -100)
        return F.cross_entropy(model(x).flatten(0, 1), labels.flatten(), ignore_index=-100), kept.sum()

    def by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for micro in step.micro_batches({"x": x, "y": y}):
            with micro as part:
                loss, weight = loss_of(part["x"], part["y"])
                micro.backward(loss, weight)
        return step.loss

    text = torch.randint(WORDS, (64 * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    losses: list[torch.Tensor] = []
    over = False
    while not over:
        batch = text[len(losses) * BATCH % len(text):][:BATCH]
        x, y = batch[:, :-1], batch[:, 1:]
        losses.append(by_hand(x, y) if args.way == "by-hand" else step(loss_of, x, y))
        over = len(losses) == args.steps if args.steps else args.until.exists()
    args.out.write_text(json.dumps({
        "digest": digest(model, optimizer), "losses": [loss.item().hex() for loss in losses], "steps": len(losses),
        "shared": step.shared, "stats": step.stats(), "phases": [(0, "training")]}))


if __name__ == "__main__":
    main()
