"""The job of the benchmark `parking`, which knows nothing of Sluice: keeps so many GiB of the device and does what it is asked.

    python parking_job.py GIB

Each line of standard input is answered by a line: `fill`, all of it becomes other numbers; `touch`, one kernel on it, which
says how long that took in ms; `check`, whether all is what it was filled with.
"""

import sys
import time

import torch

MIB = 1 << 20
PIECE = 256 * MIB  # of an allocation

if __name__ == "__main__":
    pieces = [torch.empty(PIECE // 4, dtype=torch.int32, device="cuda") for _ in range(int(float(sys.argv[1]) * 4))]
    generation = 0
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        answer = "done"
        if line.strip() == "fill":
            generation += 1
            for number, piece in enumerate(pieces):
                torch.manual_seed(1000 * generation + number)
                piece.random_()
        elif line.strip() == "check":
            right = True
            for number, piece in enumerate(pieces):
                torch.manual_seed(1000 * generation + number)
                right = right and torch.equal(piece, torch.empty_like(piece).random_())
            answer = "right" if right else "wrong"
        else:
            pieces[0][:1].sum()
        torch.cuda.synchronize()
        print(answer, 1000 * (time.perf_counter() - began), flush=True)
