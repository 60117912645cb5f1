#!/usr/bin/env python3
"""Trains a small convolution net on the handwritten digits that come with scikit-learn, and tests it.

    python examples/train_digits.py --steps 200
    build/release/bin/sluice run -- python examples/train_digits.py --steps 200
    build/release/bin/sluice run -- torchrun --nproc-per-node 2 examples/train_digits.py --steps 200

Several processes each train on a part of the samples, and share the gradients; with --balance, on as large a part of each batch as
they are fast.
"""

import training  # first: it finds the package `sluice` in this checkout
from training import Progress

TEST_SAMPLES = 297  # of 1797


def main() -> None:
    parser = training.parser("Trains a small convolution net on the digits of scikit-learn.")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data (default 0)")
    parser.add_argument("--balance", action="store_true", help="deal batches to processes by how fast each trains")
    parser.add_argument("--least-accuracy", type=float, default=0.0, help="fail below this share of right answers")
    options = parser.parse_args()
    device = training.prepare(options)

    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import sluice

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    samples = TensorDataset(images[train], labels[train])
    size, balance = options.batch or 128, None
    if options.balance:
        sampler = balance = sluice.BalancedBatchSampler(samples, size * training.processes(), seed=options.seed, drop_last=True)
        loader = DataLoader(samples, batch_sampler=balance, num_workers=options.workers)
    else:
        sampler = DistributedSampler(samples, seed=options.seed) if training.in_several_processes() else None
        loader = DataLoader(
            samples, batch_size=size, shuffle=sampler is None, sampler=sampler, drop_last=True,
            num_workers=options.workers, generator=torch.Generator().manual_seed(options.seed),
        )

    model = training.replica(nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
    ).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = sluice.Step(model, optimizer, micro_batch=options.micro_batch, balance=balance)

    progress = Progress(options)
    epoch = 0
    while not progress.over:
        if sampler is not None:
            sampler.set_epoch(epoch)
            epoch += 1
        for x, y in loader:
            if progress.over:
                break
            loss = step(lambda x, y: F.cross_entropy(model(x), y), x.to(device), y.to(device))
            progress.stepped(loss, step.stats())
    progress.finish()

    with torch.no_grad():
        right = (model(images[test].to(device)).argmax(1).cpu() == labels[test]).float().mean().item()
    if training.rank() == 0:
        print(f"{right:.1%} of {TEST_SAMPLES} digits never seen are recognised")
    if right < options.least_accuracy:
        raise SystemExit(f"that is less than {options.least_accuracy:.1%}")


if __name__ == "__main__":
    main()
