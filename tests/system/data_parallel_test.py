"""Two processes with replicas of a model, of which either is disturbed at random instants, learn what undisturbed ones learn;
and what becomes of them when one dies.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_SECONDS, reaches  # noqa: E402

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import exactness  # noqa: E402
from disturbing import discards_of  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"
DEMANDS = 30
JOB = replace(exactness.HOST, arguments=(), demand_bytes=20 << 20, most_delay_ms=150,
              script=exactness.BENCHMARKS / "exact_ranks_job.py")


@pytest.mark.deadline(900)
def test_disturbed_training_is_bit_equal_to_undisturbed(sluice):
    assert sum(discards_of(JOB, DEMANDS, sluice)) >= DEMANDS // 8


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


@contextlib.contextmanager
def trained_by_torchrun(sluice: Path, runtime_folder: Path, tmp_path: Path, device: str, *options: str) -> Iterator[Any]:
    """The example in two processes; yields the job, its log of losses and its output. It ends when the file `until` is there.

    With a store that torchrun shares with them, ranks that it starts again may find each other's addresses of the time before,
    and wait for ever: pytorch/pytorch#135712.
    """
    log, until, output = tmp_path / "log", tmp_path / "until", tmp_path / "output"
    with output.open("wb") as written:
        job = subprocess.Popen(
            [sluice, "run", "--runtime-dir", runtime_folder, "--memory", "256MiB" if device == "cpu" else "4GiB", "--backend",
             "host" if device == "cpu" else "cuda", "--require-pool", "--", sys.executable, "-m", "torch.distributed.run",
             "--standalone", "--nproc-per-node", "2", *options, "--no-python", "--", sys.executable, EXAMPLE, "--device", device,
             "--until", until, "--batch", "32", "--log", log, "--log-interval", "0"],
            stdout=written, stderr=subprocess.STDOUT, env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        yield job, log, output
    finally:
        until.touch()
        job.terminate()
        job.wait(PATIENCE_SECONDS)


def all_is_free(sluice: Path, runtime_folder: Path, device: str) -> bool:
    for option in [[]] if device == "cpu" else [["--device", "0"], ["--device", "1"]]:
        said = subprocess.run([sluice, "status", "--json", "--runtime-dir", runtime_folder, *option], capture_output=True,
                              check=True, timeout=PATIENCE_SECONDS).stdout
        pool = json.loads(said)
        if pool["clients"] or pool["pool"]["free_bytes"] + pool["pool"]["dirty_bytes"] != pool["pool"]["bytes"]:
            return False
    return True


def has_trained(log: Path, lines: int) -> bool:
    return log.exists() and log.read_text().count("\n") >= lines


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs"))]


@pytest.mark.deadline(900)
@pytest.mark.parametrize("device", DEVICES)
def test_when_a_process_is_killed_the_other_ends_and_the_pool_has_all_its_memory_again(sluice, runtime_folder, tmp_path, device):
    with trained_by_torchrun(sluice, runtime_folder, tmp_path, device) as (job, log, output):
        assert reaches(lambda: has_trained(log, 5))
        ranks = ranks_of(runtime_folder)
        assert len(ranks) == 2
        os.kill(random.choice(ranks), signal.SIGKILL)
        assert job.wait(PATIENCE_SECONDS) not in (0, None)
        assert "torch.distributed.elastic" in output.read_text()
    assert reaches(lambda: all_is_free(sluice, runtime_folder, device))


@pytest.mark.deadline(900)
@pytest.mark.parametrize("device", DEVICES)
def test_torchrun_starts_the_ranks_again_when_one_is_killed_and_they_share_as_before(sluice, runtime_folder, tmp_path, device):
    with trained_by_torchrun(sluice, runtime_folder, tmp_path, device, "--max-restarts", "3") as (job, log, output):
        assert reaches(lambda: has_trained(log, 5))
        before = set(ranks_of(runtime_folder))
        log.unlink()  # the ranks that come next begin another
        os.kill(random.choice(sorted(before)), signal.SIGKILL)
        assert reaches(lambda: has_trained(log, 5) and len(set(ranks_of(runtime_folder)) - before) == 2), output.read_text()
        assert not before & set(ranks_of(runtime_folder))
        (tmp_path / "until").touch()
        assert job.wait(PATIENCE_SECONDS) == 0, output.read_text()
    assert reaches(lambda: all_is_free(sluice, runtime_folder, device))
