#!/usr/bin/env python3
"""Trains a small GPT-2 of random weights with Hugging Face's Trainer, on the source of the Python standard library.

    python examples/train_transformers.py --steps 50
    build/release/bin/sluice run -- python examples/train_transformers.py --steps 50
    build/release/bin/sluice run -- torchrun --nproc-per-node 2 examples/train_transformers.py --steps 50
"""

import os
import tempfile

import training  # first: it finds the package `sluice` in this checkout
from training import Progress

CONTEXT = 128
ENDLESS = 1_000_000  # steps; what the command line says ends it before


def main() -> None:
    options = training.parser("Trains a small GPT-2 of random weights with Hugging Face's Trainer.").parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, and nobody asked
    device = training.prepare(options)

    import torch
    import transformers

    import charlm
    from sluice.integrations.transformers import share

    text = charlm.standard_library_text()

    class Excerpts(torch.utils.data.Dataset):
        """Text cut into pieces of CONTEXT characters."""

        def __len__(self) -> int:
            return len(text) // CONTEXT

        def __getitem__(self, index: int) -> dict:
            characters = text[index * CONTEXT : (index + 1) * CONTEXT].long()
            return {"input_ids": characters, "labels": characters}

    class Log(transformers.TrainerCallback):
        """Tells the log of each step, and the trainer when to end."""

        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:
                progress.stepped(logs["loss"], sharing.stats())

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = progress.over or state.global_step == options.steps

    # Without dropout: then slices of another size, when memory is short, change what is learned by rounding alone.
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=charlm.VOCABULARY, n_positions=CONTEXT, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model, train_dataset=Excerpts(), callbacks=[Log()],
            args=transformers.TrainingArguments(
                output_dir=folder, per_device_train_batch_size=options.batch or 32, max_steps=ENDLESS, learning_rate=1e-3,
                lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                seed=options.seed, use_cpu=device.type == "cpu"))
        trainer.remove_callback(transformers.PrinterCallback)
        sharing = share(trainer, micro_batch=options.micro_batch or 16)
        progress = Progress(options)
        trainer.train()
        progress.finish()


if __name__ == "__main__":
    main()
