"""Processes with shards of a model, or other parts of it, on the host: whichever loses its memory, they learn what undisturbed
ones learn; and what others hear when one of them does something else.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402
from disturbing import discards_of  # noqa: E402

DEMANDS = 16
SCRIPT = Path(__file__).resolve().parent / "shards_job.py"
pytestmark = pytest.mark.deadline(900)


@pytest.mark.parametrize("kind", ["shards", "hybrid", "tensors", "grid"])
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice, kind):
    check_exactness(sluice, kind)


@pytest.mark.parametrize("layers", ["checkpointed", "compiled"])
def test_shards_of_layers_that_are_run_twice_or_compiled_are_trained_as_exactly(sluice, layers):
    check_exactness(sluice, "shards", "--layers", layers)


def test_shards_that_go_through_checkpoints_are_trained_as_exactly(sluice, tmp_path):
    check_exactness(sluice, "shards", "--through", tmp_path)


def check_exactness(sluice: Path, kind: str, *more: str | Path) -> None:
    job = exactness.of_ranks(kind, 0)
    job = replace(job, arguments=(*job.arguments, *more))
    assert min(discards_of(job, DEMANDS, sluice)) >= DEMANDS // 8


def test_two_jobs_in_one_runtime_folder_are_each_trained_as_exactly(sluice):
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    jobs = [exactness.of_ranks("shards", 0, place) for place in range(2)]
    for outcome in exactness.compare_beside(jobs, DEMANDS, seed, sluice.parent):
        assert outcome.disturbed["shared"] and outcome.same, str(outcome)
        assert min(outcome.disturbed["stats"]["discards"]) >= DEMANDS // 8


def become_of(sluice: Path, runtime_folder: Path, tmp_path: Path, way: str) -> tuple[list[dict], str]:
    """Of each rank, if it lives to tell; and what they have said on standard error."""
    out = tmp_path / "out"
    done = subprocess.run(
        [sluice, "run", "--runtime-dir", runtime_folder, "--memory", "64MiB", "--backend", "host", "--require-pool", "--",
         sys.executable, SCRIPT, "--way", way, "--out", out], env=exactness.environment(), stderr=subprocess.PIPE, text=True, check=True)
    print(done.stderr)
    found = [out.with_suffix(f".{rank}") for rank in range(2)]
    return [json.loads(each.read_text()) if each.exists() else {} for each in found], done.stderr


def test_when_one_raises_the_other_runs_its_micro_batch_again_and_hears_what_the_first_does_next(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "one_raises")
    assert ranks[1]["stats"]["discards"] == 1
    for rank in ranks:
        assert rank["raised"].startswith("SluiceError: ranks differ in collective")
        assert "rank 0 calls allreduce of 1 float64, rank 1 calls allgather_base of" in rank["raised"]


def test_what_all_raise_ends_a_step_and_the_next_is_as_if_it_had_not_been(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "both_raise")
    assert [rank["raised"] for rank in ranks] == ["", ""]


def test_when_the_rehearsal_of_one_fails_it_tells_so_beside_what_comes_of_it(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "one_rehearsal_fails")
    assert all(rank["raised"].startswith("SluiceError: ranks differ in collective") for rank in ranks)
    cause = "sluice's rehearsal with 2 samples had failed before: RuntimeError: no room for a workspace"
    assert [cause in rank["raised"] for rank in ranks] == [True, False]


def test_when_one_is_killed_the_other_hears_which(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "killed")
    assert ranks[0]["raised"].startswith("SluiceError: rank 1 has died; collective") and not ranks[1]


def test_when_one_is_stopped_the_other_tells_and_ends_as_its_process_group_would(sluice, runtime_folder, tmp_path):
    ranks, said = become_of(sluice, runtime_folder, tmp_path, "stopped")
    assert "has waited for rank 1 as long as its process group does, 6 s" in ranks[0]["raised"]
    assert "waits for rank 1\n" in said


def test_calls_that_differ_are_named(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "differ")
    for rank in ranks:
        assert "rank 0 calls allreduce of 5 float32, rank 1 calls broadcast of 5 float32" in rank["raised"]


def test_sends_inside_of_micro_batches_are_refused(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "send")
    assert [rank["raised"].split(":", 1)[0] for rank in ranks] == ["SluiceError"] * 2
    assert "c10d::send was called inside of a micro-batch" in ranks[0]["raised"]


def test_an_interrupt_ends_a_wait_for_others(sluice, runtime_folder, tmp_path):
    ranks, _ = become_of(sluice, runtime_folder, tmp_path, "interrupted")
    assert ranks[0]["raised"] == "KeyboardInterrupt: "
    assert ranks[1]["raised"].startswith("SluiceError: rank 0 has died; collective")
