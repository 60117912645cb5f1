"""A training job of several processes, each on a core of its own, on some of which others work: how many samples it trains.

    balance_job.py --rank R --ranks N --core C --neighbours K --meeting FILE --seconds S --out FILE

The processes train by themselves first, then together in equal parts and in balanced ones, in turns. Rank 0 writes what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BATCH, MICRO_BATCH, FEATURES = 2048, 64, 512
#: Equal parts and balanced ones, so that what drifts drifts for both.
TURNS = ("even", "balanced", "balanced", "even")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rank", "ranks", "core", "neighbours"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--meeting", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})

    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader, TensorDataset

    import sluice

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{args.meeting}", rank=args.rank, world_size=args.ranks)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.neighbours)]  # on the same core

    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(8 * BATCH, FEATURES, generator=generator), torch.randint(10, (8 * BATCH,), generator=generator))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10))

    class Training:
        def __init__(self, module: nn.Module, batches: sluice.BalancedBatchSampler, seconds: float, **how) -> None:
            self.module, self.batches, self.seconds = module, batches, seconds
            self.loader = DataLoader(samples, batch_sampler=batches)
            self.step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.01), MICRO_BATCH, **how)

        def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.module(x), y)

        def per_s(self) -> float:
            """Samples of all batches a second, for so long."""
            began, steps = time.perf_counter(), 0
            while True:
                for x, y in self.loader:
                    self.step(self.loss_of, x, y)
                    steps += 1
                    if self.over(time.perf_counter() - began > self.seconds):
                        return steps * BATCH / (time.perf_counter() - began)

        def over(self, mine: bool) -> bool:
            """All leave after the same step."""
            if not isinstance(self.module, nn.parallel.DistributedDataParallel):
                return mine
            said = torch.tensor(int(mine))
            distributed.broadcast(said, 0)
            return bool(said)

    own = distributed.new_group([args.rank], use_local_synchronization=True)
    apart = Training(model(), sluice.BalancedBatchSampler(samples, BATCH, group=own), args.seconds)
    rates = [None] * args.ranks
    distributed.barrier()
    distributed.all_gather_object(rates, apart.per_s())

    parallel = nn.parallel.DistributedDataParallel(model())
    ways = {}
    for way in ("even", "balanced"):
        batches = sluice.BalancedBatchSampler(samples, BATCH, multiple_of=MICRO_BATCH // 4)
        ways[way] = Training(parallel, batches, args.seconds, **({"balance": batches} if way == "balanced" else {}))
    ways["balanced"].per_s()  # finds its parts
    measured = {way: [] for way in ways}
    for way in TURNS:
        measured[way].append(ways[way].per_s())
    shared = [None] * args.ranks
    distributed.all_gather_object(shared, ways["balanced"].step.shared)
    for each in neighbours:
        each.kill()
        each.wait()
    if args.rank == 0:
        args.out.write_text(json.dumps({"alone": rates, **measured, "parts": ways["balanced"].batches.parts, "shared": all(shared)}))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
