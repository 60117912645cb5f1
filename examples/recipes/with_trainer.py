#!/usr/bin/env python3
"""Hugging Face's Trainer, which is told once that it shares.

    PYTHONPATH=runtime/python python examples/recipes/with_trainer.py
    build/release/bin/sluice run -- python examples/recipes/with_trainer.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

from sluice.integrations.transformers import share

WORDS, LENGTH = 64, 32


class Sentences(Dataset):
    """Counts upwards, from a random number on."""

    def __init__(self, count: int) -> None:
        self.words = (torch.randint(WORDS, (count, 1)) + torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 with Hugging Face's Trainer.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    torch.manual_seed(0)

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model, train_dataset=Sentences(1024),
            args=transformers.TrainingArguments(
                output_dir=folder, per_device_train_batch_size=32, max_steps=options.steps, learning_rate=1e-3, seed=0,
                save_strategy="no", report_to=[], disable_tqdm=True))
        share(trainer, micro_batch=16)      # the one line that is new
        loss = trainer.train().training_loss
    print(f"mean loss {loss:.4f} in {options.steps} steps")

    if options.save:
        torch.save({"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, options.save)


if __name__ == "__main__":
    main()
