#!/usr/bin/env python3
"""Trains a character-level language model on the source of the Python standard library.

    python examples/train_charlm.py --seconds 30                       plain PyTorch
    build/release/bin/sluice run -- python examples/train_charlm.py --seconds 30      in the shared pool
"""

import dataclasses

import training  # first: it finds the package `sluice` in this checkout
from training import Progress


def main() -> None:
    parser = training.parser("Trains a character-level language model on the source of the Python standard library.")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    for name in ("width", "layers", "heads", "context", "groups"):
        parser.add_argument(f"--{name}", type=training.positive, help="of the model; the default fits the device")
    options = parser.parse_args()
    device = training.prepare(options)

    import torch

    import charlm
    import sluice

    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(charlm.Size)}
    size = dataclasses.replace(charlm.SIZES[device.type], **{k: v for k, v in given.items() if v is not None})
    if size.width % size.heads:
        parser.error(f"--width {size.width} is no multiple of --heads {size.heads}")

    model = charlm.CharLM(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    excerpts = charlm.Excerpts(charlm.standard_library_text(), size.context, options.seed)
    step = sluice.Step(model, optimizer, micro_batch=size.micro_batch)

    progress = Progress(options)
    while not progress.over:
        x, y = (each.to(device) for each in excerpts.batch(size.batch))
        loss = step(lambda x, y: charlm.loss_of(model, x, y), x, y)
        progress.stepped(loss, step.stats())
    progress.finish()


if __name__ == "__main__":
    main()
