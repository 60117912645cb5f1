"""Children that a test forks, and what they say."""

import os
from collections.abc import Callable


def in_forked_child(body: Callable[[], str]) -> str:
    """What it returns, or else raises, in a child of this process."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = body()
        except BaseException as why:
            said = f"{type(why).__name__}: {why}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said
