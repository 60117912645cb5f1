"""Processes that are forked to run a function each."""

import os
import sys
import traceback
from collections.abc import Callable


def fork(body: Callable[[], None]) -> int:
    """Runs it in a child of this process, and returns the child's process number. The child ends with it: with 1, after a traceback,
    if it raises, else with 0, and at once: gloo's threads are at times not joined when Python ends, which aborts the process."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
