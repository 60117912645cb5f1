"""Trains GPT-2 on words drawn at random, with activations that are kept, computed again, or whichever the step chooses.

For --seconds after --warm-up of them; then it writes one JSON object to --out: samples_per_s, the median of its steps',
and the step's stats. With --fixed its micro-batches do not adapt, its kernels are deterministic, it ends after --steps, and a digest of
the weights is written as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from exact_job import digest
from transformers import GPT2Config, GPT2LMHeadModel

import sluice

#: The model's configuration, and samples of a batch and a sequence's length.
SIZES = {"host": ({"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 256}, 32, 64),
         "cuda": ({"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257}, 16, 1024)}

LEAST_STEPS = 3  # that are measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=SIZES, required=True)
    parser.add_argument("--activations", choices=("kept", "again", "chosen"), required=True)
    parser.add_argument("--warm-up", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.fixed:
        torch.use_deterministic_algorithms(True)
    config, batch, length = SIZES[args.backend]
    device = "cuda" if args.backend == "cuda" else "cpu"
    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config(n_positions=length, use_cache=False, bos_token_id=0, eos_token_id=0, **config))
    if args.activations == "again":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    step = sluice.Step(model, optimizer, args.micro_batch, adapt=not args.fixed, recompute=args.activations == "chosen")
    words = torch.randint(config["vocab_size"], (8 * batch, length), generator=torch.Generator().manual_seed(1)).to(device)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return model(x, labels=x).loss

    took: list[float] = []
    done, started = 0, time.monotonic()
    while done < args.steps if args.fixed else len(took) < LEAST_STEPS or time.monotonic() < started + args.warm_up + args.seconds:
        at = done % 8 * batch
        began = time.monotonic()
        step(loss_of, words[at:at + batch]).item()  # which waits for the device
        if began >= started + args.warm_up:
            took.append(time.monotonic() - began)
        done += 1
    args.out.write_text(json.dumps({"samples_per_s": batch / statistics.median(took), "steps": len(took), "shared": step.shared,
                                    "stats": step.stats(), "digest": digest(model, optimizer) if args.fixed else None}))


if __name__ == "__main__":
    main()
