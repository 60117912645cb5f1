"""A program that ends with work on its way to the device that nobody has waited for, as programs may.

    python -S ending_job.py LAUNCHES
"""

import sys

from cuda_program import allocate, enter_context, fill_later

SIZE = 1 << 20
enter_context()
address = allocate(SIZE)
for _ in range(int(sys.argv[1])):
    fill_later(address, SIZE)
