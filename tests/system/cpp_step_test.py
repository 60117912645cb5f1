"""The step for C++ under `sluice run`, while a server takes its memory: bit-equal to plain libtorch (host backend).

The seed of the demands is printed; SLUICE_TEST_SEED repeats it.
"""

import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launching import call

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402

DEMANDS = 24


@pytest.fixture
def job(build):
    return build / "bin" / "torch_step_job"


@pytest.mark.parametrize("way", [way for way, languages in exactness.WAYS.items() if "c++" in languages])
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice, job, way):
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    of_way = exactness.in_way(replace(exactness.HOST, arguments=(), script=job), way)
    outcome = exactness.compare(of_way, DEMANDS, seed, sluice.parent)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert outcome.disturbed["stats"]["discards"] >= DEMANDS // 4
    assert outcome.disturbed["stats"]["discarded_seconds"] > 0
    assert outcome.same, str(outcome)


def test_a_program_that_cannot_share_says_so_once_and_trains_all_the_same(job, tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_RUN", "1")
    monkeypatch.setenv("SLUICE_RUNTIME_LIBRARY", str(tmp_path / "libsluice_runtime.so"))
    done = call(job, "--steps", "2", "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sluice: this process trains without sharing: cannot open") == 1
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["stats"]["steps"] == 2 and not said["shared"]
    monkeypatch.setenv("SLUICE_REQUIRE_POOL", "1")
    done = call(job, "--steps", "2", "--out", tmp_path / "other.json")
    assert done.returncode == 125 and not (tmp_path / "other.json").exists()
    assert "--require-pool does not let it train without sharing: cannot open" in done.stderr


def in_pool_of(memory, sluice, job, out, *arguments):
    """A step or two over slices of 512 samples."""
    return call(sluice, "run", "--backend", "host", "--memory", memory, "--require-pool", "--", job, "--batch", "512",
                "--micro-batch", "512", "--out", out, *arguments)


def test_a_slice_that_can_never_fit_is_told_with_who_holds_the_memory(sluice, job, tmp_path):
    done = in_pool_of("16MiB", sluice, job, tmp_path / "out.json", "--steps", "1")
    assert done.returncode == 1
    assert "a micro-batch of 512 samples needs more than the" in done.stderr
    assert "of the pool's 16 MiB this job holds " in done.stderr


def test_slices_become_smaller_where_they_do_not_fit(sluice, job, tmp_path):
    done = in_pool_of("64MiB", sluice, job, tmp_path / "out.json", "--steps", "2", "--adapt")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["shared"] and said["stats"]["discards"] > 0
    assert said["stats"]["samples"] == 1024 and said["stats"]["micro_batch"] < 512


@pytest.mark.deadline(900)
@pytest.mark.skipif(not all(map(shutil.which, ("cmake", "c++"))), reason="needs a compiler")
def test_a_copy_of_the_example_is_built_by_itself_and_learns_in_the_pool(sluice, build, checkout, tmp_path):
    copy = shutil.copytree(checkout / "examples" / "train_cpp", tmp_path / "train_cpp")
    for words in (("-S", copy, "-B", tmp_path / "built", f"-Dsluice_DIR={checkout}/cmake", f"-DSLUICE_BUILD={build}",
                   f"-DSLUICE_PYTHON={sys.executable}"),
                  ("--build", tmp_path / "built")):
        made = call("cmake", *words, timeout=None)  # it has this test's deadline
        assert made.returncode == 0, made.stdout + made.stderr
    done = call(sluice, "run", "--backend", "host", "--memory", "64MiB", "--require-pool", "--",
                tmp_path / "built" / "train_cpp", timeout=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("in the pool: ")
    assert float(done.stdout.splitlines()[1].split()[0]) > 90
