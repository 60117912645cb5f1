"""Replicas and shards of several ranks, which agree on each collective: disturbed, they learn what undisturbed ones learn.

Where there is one GPU the ranks share it (benchmarks/ranks.py)."""

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import exactness  # noqa: E402
import nccl_stress  # noqa: E402
from ranks import RANKS  # noqa: E402

DEMANDS = 40
#: Beside each other they would not fit on one GPU.
KINDS = [pytest.param(kind, marks=[pytest.mark.xdist_group("four ranks")] if of.ranks > 2 else [])
         for kind, of in exactness.KINDS.items()]


def check_exactness(build: Path, kind: str, *more: str) -> None:
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    outcome = exactness.compare(exactness.of_ranks(kind, torch.cuda.device_count()), DEMANDS, seed, build / "bin", more)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert sum(outcome.disturbed["stats"]["discards"]) >= DEMANDS // 8
    assert outcome.same, str(outcome)


@pytest.mark.deadline(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("submission", ["deferred", "direct"])
def test_disturbed_training_is_bit_equal_to_undisturbed(build, submission, kind, monkeypatch):
    monkeypatch.setenv("SLUICE_SUBMISSION", submission)
    check_exactness(build, kind)


@pytest.mark.deadline(300)
@pytest.mark.parametrize("layers", ["checkpointed", "compiled"])
def test_so_is_that_of_shards_of_layers_that_are_run_twice_or_compiled(build, layers):
    check_exactness(build, "shards", "--layers", layers)


@pytest.mark.deadline(300)
def test_so_is_that_of_shards_that_go_through_checkpoints(build, tmp_path):
    check_exactness(build, "shards", "--through", str(tmp_path))


def ranks(sluice: Path, checkout: Path, script: str) -> list[str]:
    """What two ranks print, in order."""
    done = subprocess.run(
        [sluice, "run", "--backend", "cuda", "--memory", "4GiB", "--require-pool", "--", sys.executable, "-m",
         "torch.distributed.run", "--standalone", "--nproc-per-node=2", Path(__file__).with_name(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout / "runtime" / "python"), str(checkout / "benchmarks")))},
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(done.stdout.splitlines())


@pytest.mark.deadline(200)
def test_without_a_server_no_step_waits_for_the_device(sluice, runtime_folder, checkout):
    assert ranks(sluice, checkout, "replicas_job.py") == ["rank 0 True True", "rank 1 True True"]


@pytest.mark.deadline(200)
def test_ranks_with_unequal_parts_learn_what_one_gpu_learns_that_has_all(sluice, runtime_folder, checkout):
    worst = [float(line.split()[2]) for line in ranks(sluice, checkout, "unequal_job.py")]
    assert len(worst) == 2 and max(worst) < 1e-12, worst


@pytest.mark.deadline(200)
def test_collectives_exchanges_and_graphs_are_right_while_ranks_are_paused(build, monkeypatch):
    monkeypatch.setenv(RANKS, str(max(2, torch.cuda.device_count())))
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    found = nccl_stress.measure(argparse.Namespace(
        backend="cuda", seconds=10.0, seed=seed, algorithm="any", protocol="any", plain=False, largest=64,
        sluice=build / "bin" / "sluice", pauser=build / "lib" / "libsluice_bench_pauser.so"))
    assert found["collectives"] > 0 and found["pauses"] > 0, found
    assert found["wrong"] == 0 and found["timeouts"] == 0, found
