"""How long tests wait for what is to come, all of them the same: what never comes fails a test, and what comes late does not.

A machine that does other work beside the tests takes several times as long for everything. So a wait says what it waits for and not how
long that may take; and what has to be fast is measured in benchmarks.
"""

from __future__ import annotations

import time

import pytest

PATIENCE_SECONDS = 240.0  # less than a test's deadline (tests/conftest.py), so that it says what it has waited for


def reaches(holds) -> bool:
    """Looks again and again until `holds()` is true; whether it came to be."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def eventually(holds, what: str = "what the test waits for"):
    """The first true result of `holds()`; fails the test where there is none."""
    found = None

    def look():
        nonlocal found
        found = holds()
        return found
    if not reaches(look):
        pytest.fail(f"not within {PATIENCE_SECONDS:g} s: {what}")
    return found
