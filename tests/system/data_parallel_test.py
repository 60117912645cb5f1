"""Two processes with replicas of a model, of which either is disturbed at random instants, learn what undisturbed ones learn;
and what becomes of them when one dies.

The seed of the demands is printed; SLUICE_TEST_SEED repeats it.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402
from launching import reaches  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"
DEMANDS = 30
JOB = replace(exactness.HOST, arguments=(), demand_bytes=20 << 20, most_delay_ms=150,
              script=exactness.BENCHMARKS / "exact_ranks_job.py")


@pytest.mark.gloo
@pytest.mark.deadline(300)
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice):
    seed = int(os.environ.get("SLUICE_TEST_SEED") or random.randrange(1 << 31))
    print(f"seed {seed}")
    outcome = exactness.compare(JOB, DEMANDS, seed, sluice.parent)
    print(outcome.disturbed["stats"])
    assert outcome.disturbed["shared"] and not outcome.undisturbed["shared"]
    assert sum(outcome.disturbed["stats"]["discards"]) >= DEMANDS // 8
    assert outcome.same, str(outcome)


def test_a_process_knows_whether_its_ranks_agree_on_what_they_send(build, checkout):
    program = "from sluice import _runtime; print(_runtime.ranks_agree())"
    environment = {**os.environ, "PYTHONPATH": str(checkout / "runtime" / "python")}
    for preload, expected in (("", "False"), (str(build / "lib" / "libsluice_nccl.so"), "True")):
        done = subprocess.run([sys.executable, "-c", program], env={**environment, "LD_PRELOAD": preload}, capture_output=True,
                              text=True, check=True)
        assert done.stdout.strip() == expected


def ranks_of(runtime_folder: Path) -> list[int]:
    """The processes that torchrun has started in that pool."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"SLUICE_RUNTIME_DIR={runtime_folder}".encode() in variables and any(
                    each.startswith(b"LOCAL_RANK=") for each in variables):
                found.append(int(process.name))
    return found


@pytest.mark.gloo
@pytest.mark.deadline(300)
def test_when_a_process_is_killed_the_other_ends_and_the_pool_has_all_its_memory_again(sluice, runtime_folder, tmp_path):
    log, until = tmp_path / "log", tmp_path / "until"
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(
            [sluice, "run", "--runtime-dir", runtime_folder, "--memory", "256MiB", "--require-pool", "--", sys.executable, "-m",
             "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", "--", sys.executable, EXAMPLE,
             "--device", "cpu", "--until", until, "--batch", "32", "--log", log, "--log-interval", "0"],
            stdout=output, stderr=subprocess.STDOUT)
    try:
        assert reaches(lambda: log.exists() and log.read_text().count("\n") >= 5, 120.0)
        ranks = ranks_of(runtime_folder)
        assert len(ranks) == 2
        os.kill(random.choice(ranks), signal.SIGKILL)
        assert job.wait(100) not in (0, None)
        assert "torch.distributed.elastic" in (tmp_path / "output").read_text()
    finally:
        until.touch()
        job.terminate()
        job.wait(60)
    pool = json.loads(subprocess.run([sluice, "status", "--json", "--runtime-dir", runtime_folder], capture_output=True,
                                     check=True, timeout=60).stdout)
    assert not pool["clients"]
    assert pool["pool"]["free_bytes"] + pool["pool"]["dirty_bytes"] == pool["pool"]["bytes"], pool
