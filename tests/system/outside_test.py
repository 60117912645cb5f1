"""What loss functions change outside of their step's model, under `sluice run`, while a server takes memory: bit-equal to plain
PyTorch (host backend).

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

DEMANDS = 24  # of which many meet memory that is not in use
JOB = replace(exactness.HOST, arguments=(), demand_bytes=8 << 20, most_delay_ms=100,
              script=Path(__file__).with_name("outside_job.py"))


@pytest.mark.deadline(300)
@pytest.mark.parametrize("way", ["adversarial", "distillation", "average", "trunk"])
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice, way):
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(JOB, DEMANDS, seed, sluice.parent, ("--way", way))
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] > 0
    assert outcome.same, str(outcome)
