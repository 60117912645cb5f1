#!/usr/bin/env python3
"""Trains the character-level model of charlm.py in a loop of accelerate's, on the source of the Python standard library.

    python examples/train_accelerate.py --steps 50
    build/release/bin/sluice run -- python examples/train_accelerate.py --steps 50
    build/release/bin/sluice run -- torchrun --nproc-per-node 2 examples/train_accelerate.py --steps 50
"""

import training  # first: it finds the package `sluice` in this checkout
from training import Progress


def main() -> None:
    options = training.parser("Trains a character-level language model in a loop of accelerate's.").parse_args()
    device = training.prepare(options)

    import torch
    from accelerate import Accelerator

    import charlm
    from sluice.integrations.accelerate import share

    size = charlm.Size(width=64, layers=4, heads=2, context=128, groups=1 << 12, batch=options.batch or 32,
                       micro_batch=options.micro_batch or 16)
    accelerator = Accelerator(cpu=device.type == "cpu")
    model = charlm.CharLM(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    forward_backward = share(accelerator, model, optimizer, micro_batch=size.micro_batch)
    excerpts = charlm.Excerpts(charlm.standard_library_text(), size.context, options.seed + accelerator.process_index)

    progress = Progress(options)
    while not progress.over:
        x, y = (each.to(accelerator.device) for each in excerpts.batch(size.batch))
        loss = forward_backward(lambda x, y: charlm.loss_of(model, x, y), x, y)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.stepped(loss, forward_backward.stats())
    progress.finish()


if __name__ == "__main__":
    main()
