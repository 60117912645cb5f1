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

#: Of which many meet memory that is not in use, most of them where two models take turns.
DEMANDS = {"adversarial": 96, "distillation": 48, "average": 48, "trunk": 48}
JOB = replace(exactness.HOST, arguments=(), demand_bytes=8 << 20, most_delay_ms=50,
              script=Path(__file__).with_name("outside_job.py"))


@pytest.mark.deadline(900)
@pytest.mark.parametrize("way", DEMANDS)
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice, way):
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(JOB, DEMANDS[way], seed, sluice.parent, ("--way", way))
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] > 0
    assert outcome.same, str(outcome)
