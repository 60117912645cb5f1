"""Every form of the step under `sluice run`, while a server takes its memory: bit-equal to plain PyTorch (host backend).

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

DEMANDS = 24  # of which some two thirds meet memory that is not in use
JOB = replace(exactness.HOST, arguments=(), demand_bytes=10 << 20, most_delay_ms=100,
              script=Path(__file__).with_name("step_job.py"))


@pytest.mark.parametrize("way", ["by-hand", "closure"])
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice, way):
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(JOB, DEMANDS, seed, sluice.parent, ("--way", way))
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] > 0
    assert outcome.same, str(outcome)


def test_activations_are_computed_again_where_they_have_no_room_and_nothing_else_changes(sluice):
    """The first micro-batch that keeps them runs out of the pool's memory."""
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    small = replace(JOB, pool=("--memory", "20MiB"), demand_bytes=4 << 20)
    outcome = exactness.compare(small, DEMANDS, seed, sluice.parent, ("--way", "recompute"))
    stats = outcome.disturbed["stats"]
    print(stats)
    assert stats["discards"] > 1
    assert stats["recomputed"] > 0
    assert outcome.undisturbed["stats"]["recomputed"] == 0
    assert outcome.same, str(outcome)
