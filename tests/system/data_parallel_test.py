"""Two processes with replicas of a model, of which either is disturbed at random instants, learn what undisturbed ones learn.

The seed of the demands is printed; SLUICE_TEST_SEED repeats it.
"""

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402

DEMANDS = 30
JOB = replace(exactness.HOST, arguments=(), demand_bytes=20 << 20, most_delay_ms=150,
              script=Path(__file__).with_name("data_parallel_job.py"))


@pytest.mark.deadline(300)
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice):
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(JOB, DEMANDS, seed, sluice.parent)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert sum(outcome.disturbed["stats"]["discards"]) >= DEMANDS // 8
    assert outcome.same, str(outcome)
