"""Jobs that know nothing of Sluice are parked on a GPU at random instants: the same losses, bit by bit, as undisturbed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

TRAINING = Path(__file__).with_name("parked_training.py")
RANKS = Path(__file__).parents[1] / "system" / "parking_ranks.py"
GIB = 1 << 30
#: Parks that each job sees, at least; the long form has more.
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "25"))
STEPS = {"gpt": 8, "gpt-compiled": 12, "gpt-graph": 40, "resnet": 6, "trainer": 6, "cupy": 400, "jax": 400}  # for each park
STEPS_OF_RANKS = {"ddp": 10, "fsdp": 3}


def complete(job: subprocess.Popen, sluice: Path, environment: dict) -> None:
    """Until it has ended; one that does not end says where it is."""
    try:
        complaints = job.communicate(timeout=300)[1]
    except subprocess.TimeoutExpired:
        status = subprocess.run([sluice, "status"], text=True, capture_output=True, check=False, env=environment).stdout
        job.send_signal(signal.SIGABRT)
        pytest.fail(f"it does not end\n{status}\n{job.communicate(timeout=30)[1][-4000:]}")
    assert job.returncode == 0, complaints[-4000:]


def start(command: list, environment: dict) -> subprocess.Popen:
    return subprocess.Popen([*map(str, command)], text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def await_parkable(sluice: Path, environment: dict, job: subprocess.Popen, least: int, jobs: int = 1) -> None:
    """Until so much of each job can be parked, whichever pool it is in."""
    while job.poll() is None:
        done = subprocess.run([sluice, "status", "--json"], text=True, capture_output=True, check=False, env=environment)
        if done.returncode == 0:
            status = json.loads(done.stdout)
            clients = [client for pool in status.get("pools", [status]) for client in pool["clients"]]
            if sum(client["parking"]["parkable_bytes"] >= least for client in clients) == jobs:
                return
        time.sleep(0.1)


class Parker:
    """A server that takes memory from the job until `end`."""

    def __init__(self, build: Path, environment: dict, least: int, most: int, device: int = 0):
        self.process = subprocess.Popen(
            [build / "bin" / "sluice-bench-parker", "--least", str(least), "--most", str(most), "--count", "1000000", "--hold-ms", "20",
             "--apart-ms", "60", "--device", str(device)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.taken: list[dict] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.taken.append(json.loads(line))

    def parks(self) -> int:
        return sum(1 for one in self.taken if one.get("reclaimed", 0) > 0)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.reader.join()


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "runtime").mkdir(mode=0o700)
    return {**os.environ, "SLUICE_RUNTIME_DIR": str(tmp_path / "runtime"), "PYTHONFAULTHANDLER": "1"}


@pytest.mark.deadline(560)
@pytest.mark.parametrize("mode", STEPS)
def test_losses_are_those_of_an_undisturbed_job(mode, sluice, build, tmp_path, environment):
    if mode in ("cupy", "jax") and importlib.util.find_spec(mode) is None:
        pytest.skip(f"{mode} is not installed")
    steps = STEPS[mode] * PARKS
    command = [sys.executable, TRAINING, mode, steps]

    def outcome(job: subprocess.Popen, name: str) -> dict:
        complete(job, sluice, environment)
        return json.loads((tmp_path / name).read_text(encoding="utf-8"))

    alone = outcome(start([*command, tmp_path / "alone.json"], environment), "alone.json")
    job = start([sluice, "run", "--backend", "cuda", "--memory", "6GiB", "--host-memory", "6GiB", "--require-pool", "--", *command,
                 tmp_path / "shared.json", "--fill", "1"], environment)
    await_parkable(sluice, environment, job, GIB)
    parker = Parker(build, environment, 5 * GIB + GIB // 2, 6 * GIB)
    try:
        shared = outcome(job, "shared.json")
    finally:
        parker.end()
        job.kill()
    print(f"{mode}: {parker.parks()} parks, {shared['seconds']:.1f} s beside {alone['seconds']:.1f} s")
    assert shared["losses"] == alone["losses"]
    assert parker.parks() >= PARKS, [one for one in parker.taken if one["refused"]][:3]


def compare_ranks(kind: str, over: str, sluice: Path, build: Path, folder: Path, environment: dict) -> None:
    """Two ranks, over gloo on one GPU, or over NCCL on one each: disturbed and undisturbed."""
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    steps = STEPS_OF_RANKS[kind] * PARKS

    def command(into: Path) -> list:
        into.mkdir()
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS, kind, steps, 1536, into, 600, over]

    def outcome(job: subprocess.Popen, into: Path) -> list[dict]:
        complete(job, sluice, environment)
        found = [json.loads((into / f"rank-{number}.json").read_text(encoding="utf-8")) for number in range(2)]
        assert all(one.pop("kept") for one in found)
        return found

    alone = outcome(start(command(folder / "alone"), environment), folder / "alone")
    job = start([sluice, "run", "--backend", "cuda", "--memory", "6GiB", "--host-memory", "6GiB", "--require-pool", "--",
                 *command(folder / "parked")], environment)
    await_parkable(sluice, environment, job, 3 * GIB // 2, jobs=2)
    parkers = [Parker(build, environment, 5 * GIB + GIB // 2, 6 * GIB, device) for device in range(2 if over == "nccl" else 1)]
    try:
        shared = outcome(job, folder / "parked")
    finally:
        for parker in parkers:
            parker.end()
        job.kill()
    parks = [parker.parks() for parker in parkers]
    print(f"{kind} over {over}: parks {parks}")
    assert shared == alone
    assert min(parks) >= PARKS, [one for parker in parkers for one in parker.taken if one["refused"]][:3]


@pytest.mark.deadline(560)
@pytest.mark.parametrize("kind", STEPS_OF_RANKS)
def test_ranks_over_gloo_learn_what_they_would_have_learned_undisturbed(kind, sluice, build, tmp_path, environment):
    """Both on one GPU, which NCCL does not take."""
    compare_ranks(kind, "cuda", sluice, build, tmp_path, environment)


@pytest.mark.deadline(560)
@pytest.mark.parametrize("kind", STEPS_OF_RANKS)
def test_so_do_ranks_over_nccl_both_of_which_are_parked(kind, sluice, build, tmp_path, environment):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    compare_ranks(kind, "nccl", sluice, build, tmp_path, environment)
