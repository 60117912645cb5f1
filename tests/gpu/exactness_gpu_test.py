"""On a GPU too, training that is disturbed at random instants learns what undisturbed training learns, bit by bit."""

import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402

DEMANDS = 40


@pytest.mark.deadline(300)
@pytest.mark.parametrize("submission, way, more", [("deferred", "adamw", ()), ("deferred", "adamw", ("--hooked",)),
                                                   ("direct", "adamw", ()), ("deferred", "scaled", ())],
                         ids=["deferred", "deferred, hooked", "direct", "scaled"])
def test_disturbed_training_is_bit_equal_to_undisturbed(build, submission, way, more, monkeypatch):
    monkeypatch.setenv("SLUICE_SUBMISSION", submission)
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    outcome = exactness.compare(exactness.in_way(exactness.CUDA, way), DEMANDS, seed, build / "bin", more)
    print(f"demands met {dict(outcome.demands)}; {outcome.disturbed['stats']}; in vain {outcome.disturbed['in_vain']}")
    assert outcome.disturbed["in_vain"] == 0 or (submission == "deferred" and way == "adamw" and not more)
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] >= DEMANDS // 8
    assert outcome.same, str(outcome)


@pytest.mark.deadline(300)
@pytest.mark.parametrize("loop", ["gru", "gan", "vit-reentrant"])
def test_so_are_loops_that_are_paused_with_each_demand(build, loop):
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    outcome = exactness.compare(exactness.of_loop(loop, "cuda"), DEMANDS, seed, build / "bin")
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] >= DEMANDS // 8
    assert outcome.same, str(outcome)
