"""Replicas and shards on several GPUs, whose ranks agree on each collective: disturbed, they learn what undisturbed ones learn."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import exactness  # noqa: E402

DEMANDS = 40
JOB = replace(exactness.CUDA, arguments=("--device", "cuda"), script=ROOT / "tests" / "system" / "data_parallel_job.py")


@pytest.mark.deadline(300)
@pytest.mark.parametrize("kind", ["replicas", "shards"])
@pytest.mark.parametrize("submission", ["deferred", "direct"])
def test_disturbed_training_is_bit_equal_to_undisturbed(build, submission, kind, monkeypatch):
    monkeypatch.setenv("SLUICE_SUBMISSION", submission)
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    more = ("--shards",) if kind == "shards" else ()
    outcome = exactness.compare(replace(JOB, arguments=(*JOB.arguments, *more)), DEMANDS, seed, build / "bin")
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert sum(outcome.disturbed["stats"]["discards"]) >= DEMANDS // 8
    assert outcome.same, str(outcome)


@pytest.mark.deadline(200)
def test_without_a_server_no_step_waits_for_the_device(sluice, runtime_folder, checkout):
    done = subprocess.run(
        [sluice, "run", "--backend", "cuda", "--memory", "4GiB", "--require-pool", "--", sys.executable, "-m",
         "torch.distributed.run", "--standalone", "--nproc-per-node=2", Path(__file__).with_name("replicas_job.py")],
        env={**os.environ, "PYTHONPATH": str(checkout / "runtime" / "python")}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.splitlines()) == ["rank 0 True True", "rank 1 True True"]
