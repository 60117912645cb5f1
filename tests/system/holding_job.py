"""Keeps so many MiB of the pool until its input ends; at each line of it says whether all is as it was."""

import sys

import torch

kept = torch.arange(int(sys.argv[1]) << 18, dtype=torch.float32)
total = float(kept.sum())
print("holds", flush=True)
for _ in sys.stdin:
    print("as it was" if float(kept.sum()) == total else "something else", flush=True)
