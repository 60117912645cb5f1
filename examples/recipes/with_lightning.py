#!/usr/bin/env python3
"""Lightning, whose Trainer is given another strategy.

    PYTHONPATH=runtime/python python examples/recipes/with_lightning.py
    build/release/bin/sluice run -- python examples/recipes/with_lightning.py
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sluice.integrations.lightning import SluiceStrategy


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def training_step(self, batch, index):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(1) == y).float().mean()})    # of the whole batch
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a classifier with Lightning.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=Path, help="write what was learned there")
    options = parser.parse_args()
    torch.manual_seed(0)

    x = torch.randn(1024, 20)
    y = (x @ torch.randn(20, 4)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    module = Classifier()
    trainer = lightning.Trainer(
        strategy=SluiceStrategy(micro_batch=32),        # the one line that is new
        devices=1, max_steps=options.steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, loader)
    print(f"loss {trainer.callback_metrics['loss']:.4f}, accuracy {trainer.callback_metrics['accuracy']:.1%} after "
          f"{options.steps} steps")

    if options.save:
        torch.save({"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(),
                    "metrics": dict(trainer.callback_metrics)}, options.save)


if __name__ == "__main__":
    main()
