#!/usr/bin/env python3
"""Trains the character-level model of charlm.py with Lightning, on the source of the Python standard library.

    python examples/train_lightning.py --steps 50
    build/release/bin/sluice run -- python examples/train_lightning.py --steps 50
    build/release/bin/sluice run -- torchrun --nproc-per-node 2 examples/train_lightning.py --steps 50
"""

import os

import training  # first: it finds the package `sluice` in this checkout
from training import Progress


def main() -> None:
    options = training.parser("Trains a character-level language model with Lightning.").parse_args()
    device = training.prepare(options)

    import lightning
    import torch

    import charlm
    from sluice.integrations.lightning import SluiceDDPStrategy, SluiceStrategy

    size = charlm.Size(width=64, layers=4, heads=2, context=128, groups=1 << 12, batch=options.batch or 32,
                       micro_batch=options.micro_batch or 16)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = charlm.CharLM(size)

        def training_step(self, batch, index):
            return charlm.loss_of(self.model, *batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, outputs, batch, index):
            progress.stepped(outputs["loss"], strategy.stats())
            self.trainer.should_stop = progress.over

    class Batches(torch.utils.data.IterableDataset):
        """Excerpts without end."""

        def __iter__(self):
            excerpts = charlm.Excerpts(charlm.standard_library_text(), size.context, options.seed + training.rank())
            while True:
                yield excerpts.batch(size.batch)

    several = training.in_several_processes()
    strategy = (SluiceDDPStrategy if several else SluiceStrategy)(micro_batch=size.micro_batch)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]) if several else 1, max_steps=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    module = Module()
    progress = Progress(options)
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
    progress.finish()


if __name__ == "__main__":
    main()
