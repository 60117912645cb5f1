"""Training that is disturbed at random instants learns what undisturbed training learns, bit by bit (host backend).

The seed of the demands is printed; SLUICE_TEST_SEED repeats it.
"""

import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402

DEMANDS, DEMANDS_OF_WAY = 50, 16
MOST_RUNS = 3  # instants are random: one run may miss a phase
pytestmark = pytest.mark.deadline(900)


@pytest.mark.parametrize("workers", [
    pytest.param((), id="no workers"),
    pytest.param(("--workers", "2", "--start-method", "fork"), id="forked workers"),
    pytest.param(("--workers", "2", "--start-method", "spawn"), id="spawned workers"),
])
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice, workers):
    first = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    met = Counter()
    for seed in range(first, first + MOST_RUNS):
        print(f"seed {seed}")
        outcome = exactness.compare(exactness.HOST, DEMANDS, seed, sluice.parent, workers)
        print(f"demands met {dict(outcome.demands)}; {outcome.disturbed['stats']}")
        assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
        assert sum(outcome.demands.values()) == DEMANDS
        assert outcome.disturbed["stats"]["discards"] >= DEMANDS // 4
        assert outcome.same, str(outcome)
        met += outcome.demands
        # A phase that takes a hundredth of the time is met by few demands, so these two go together.
        if met["forward"] and met["backward"] and met["commit"] + met["optimizer"]:
            return
    pytest.fail(f"demands have met {dict(met)} alone")


@pytest.mark.parametrize("way", [way for way, languages in exactness.WAYS.items() if "python" in languages and way != "adamw"])
def test_training_in_every_way_is_bit_equal_to_undisturbed(sluice, way):
    """By adamw it is above; in C++ it is in cpp_step_test.py."""
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(exactness.in_way(exactness.HOST, way), DEMANDS_OF_WAY, seed, sluice.parent)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] >= DEMANDS_OF_WAY // 4
    assert outcome.same, str(outcome)


def learnt(what: str) -> dict:
    return {"digest": what, "losses": [], "steps": 1}


@pytest.mark.parametrize(("runs", "found", "count"), [
    ("a", "a", 1),  # as the disturbed one
    ("bb", "b", 2),
    ("baa", "a", 3),  # plain PyTorch differed once: the disturbed run does not count as its second
    ("bcdeb", "b", 5),
])
def test_plain_training_that_differs_must_agree_with_itself(runs, found, count):
    each = iter(runs)
    assert exactness.reference(lambda: learnt(next(each)), learnt("a")) == (learnt(found), count)


def test_nothing_is_compared_with_plain_training_that_never_agrees():
    each = iter("bcdef")
    with pytest.raises(RuntimeError, match="something else in each of five runs"):
        exactness.reference(lambda: learnt(next(each)), learnt("a"))
