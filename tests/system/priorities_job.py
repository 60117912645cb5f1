"""A training job whose slices keep their size: each needs --arena-mib of scratch memory, and --keep-mib lasts beside it.

    priorities_job.py --arena-mib N --keep-mib N --out FILE [--steps N]

Prints "ready" after its first step. It ends after so many steps, or else once its standard input has ended, and writes its losses, bit by bit,
and whether what lasts is as it was written. What it learns does not depend on how much memory it needs.
"""

import argparse
import hashlib
import json
import select
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import sluice

BATCH, MICRO_BATCH = 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arena-mib", type=int, required=True)
    parser.add_argument("--keep-mib", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))
    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), micro_batch=MICRO_BATCH, adapt=False)
    own = torch.Generator().manual_seed(2)  # so that what it learns is the same whatever it keeps
    kept = torch.randint(0, 256, (args.keep_mib << 20,), dtype=torch.uint8, generator=own)
    before = hashlib.sha256(kept.numpy()).digest()
    data = torch.Generator().manual_seed(1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(args.arena_mib << 18)  # of four bytes; all of it is held, and one page is written
        scratch[:1] = 1.0
        return F.cross_entropy(model(x), y) * scratch[0]

    losses = []
    while len(losses) < args.steps if args.steps else not (losses and select.select([sys.stdin], [], [], 0)[0]):
        x, y = torch.randn(BATCH, 256, generator=data), torch.randint(10, (BATCH,), generator=data)
        losses.append(step(loss_of, x, y).item().hex())
        if len(losses) == 1:
            print("ready", flush=True)
        if not args.steps:
            time.sleep(0.02)  # leaves the processor to others
    args.out.write_text(json.dumps({"losses": losses, "kept": hashlib.sha256(kept.numpy()).digest() == before, "shared": step.shared}))


if __name__ == "__main__":
    main()
