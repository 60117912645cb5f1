"""Jobs of several processes that are disturbed, and compared with undisturbed ones."""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402


def discards_of(job: exactness.Job, demands: int, sluice: Path) -> list[int]:
    """Of each process, of a job that learns the same as an undisturbed one. SLUICE_TEST_SEED repeats a seed that was printed."""
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(job, demands, seed, sluice.parent)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.same, str(outcome)
    return outcome.disturbed["stats"]["discards"]
