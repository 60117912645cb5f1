"""The step for C++ on a GPU, disturbed at random instants, learns what undisturbed training learns, bit by bit."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402

DEMANDS = 40


@pytest.mark.deadline(300)
@pytest.mark.parametrize("submission, way, more", [("deferred", "adamw", ()), ("direct", "adamw", ()),
                                                   ("deferred", "adamw", ("--recurrent",)), ("deferred", "scaled", ())],
                         ids=["deferred", "direct", "recurrent", "scaled"])
def test_disturbed_training_is_bit_equal_to_undisturbed(build, submission, way, more, monkeypatch):
    monkeypatch.setenv("SLUICE_SUBMISSION", submission)
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    job = exactness.in_way(replace(exactness.CUDA, script=build / "bin" / "torch_step_job"), way)
    outcome = exactness.compare(job, DEMANDS, seed, build / "bin", more)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] >= DEMANDS // 8
    assert outcome.same, str(outcome)
