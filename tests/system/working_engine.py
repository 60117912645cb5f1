"""An engine that has the device compute when it is told so, in a process of `sluice run`; knows nothing of who hears of it.

    python -S working_engine.py

For each line of its standard input it computes until the next one, which ends that. Prints "ready" when it could.
"""

import select
import sys

from cuda_program import allocate, check, cuda, enter_context, fill_later

SIZE = 1 << 20
enter_context()
address = allocate(SIZE)
print("ready", flush=True)
while sys.stdin.readline():
    while not select.select([sys.stdin], [], [], 0)[0]:
        fill_later(address, SIZE)
    sys.stdin.readline()
    check(cuda.cuCtxSynchronize())
