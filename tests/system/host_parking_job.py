"""A training script as people write them, which knows nothing of Sluice: workers that are forked, checkpoints, a thread that writes
into a tensor's memory through NumPy.

    python host_parking_job.py STEPS KEEP_MIB

Prints "ready" once all its memory is there, "step N" after each step, and in the end a JSON object: the losses, bit by bit, a digest of the
parameters, and what is not as it was written. It ends when its standard input does, its steps made or not.
"""

import hashlib
import json
import select
import sys
import tempfile
import threading

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, KEEP_MIB = int(sys.argv[1]), int(sys.argv[2])
CHECKPOINT_EVERY = 16
torch.set_num_threads(1)
torch.manual_seed(1)


class Rows(Dataset):
    """What the script has loaded before; workers that are forked read the parent's memory."""

    def __init__(self, count: int):
        self.inputs = torch.randn(count, 256)
        self.targets = torch.randn(count, 16)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[at], self.targets[at]


class Counts(threading.Thread):
    """Adds to an array that shares a tensor's memory, round after round, between operators and during them."""

    def __init__(self):
        super().__init__(daemon=True)
        self.tensor = torch.zeros(1 << 20, dtype=torch.int64)
        self.rounds = 0
        self.ends = threading.Event()

    def run(self) -> None:
        array = self.tensor.numpy()
        while not self.ends.is_set():
            array[self.rounds % 64::64] += 1
            self.rounds += 1

    def wrong(self) -> int:
        self.ends.set()
        self.join()
        wanted = np.zeros(1 << 20, dtype=np.int64)
        for lane in range(64):
            wanted[lane::64] = (self.rounds + 63 - lane) // 64
        return int((self.tensor.numpy() != wanted).sum())


def endless(loader: DataLoader):
    while True:
        yield from loader


counts = Counts()
kept = torch.randint(0, 256, (KEEP_MIB << 20,), dtype=torch.uint8)  # caches, frozen weights
digest_before = hashlib.sha256(kept.numpy()).hexdigest()
model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = endless(DataLoader(Rows(512), batch_size=32, num_workers=2, shuffle=True, generator=torch.Generator().manual_seed(2)))
counts.start()
print("ready", flush=True)
losses = []
with tempfile.TemporaryDirectory() as folder:
    for step in range(STEPS):
        inputs, targets = next(batches)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/checkpoint.pt")
            state = torch.load(f"{folder}/checkpoint.pt", mmap=False)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        print(f"step {step}", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
sys.stdin.read()
parameters = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
print(json.dumps({"losses": losses, "parameters": parameters, "wrong counts": counts.wrong(),
                  "kept": hashlib.sha256(kept.numpy()).hexdigest() == digest_before}), flush=True)
