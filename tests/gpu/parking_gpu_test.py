"""Jobs that know nothing of Sluice are parked on a GPU at random instants: the same losses, bit by bit, as undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

TRAINING = Path(__file__).with_name("parked_training.py")
GIB = 1 << 30
#: Parks that each job sees, at least; the long form has more.
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "25"))
STEPS = {"gpt": 8, "gpt-compiled": 12, "gpt-graph": 40, "resnet": 6, "trainer": 6}  # for each park


def ended(job: subprocess.Popen, file: Path) -> dict:
    _, complaints = job.communicate(timeout=400)
    assert job.returncode == 0, complaints[-4000:]
    return json.loads(file.read_text(encoding="utf-8"))


def start(command: list, environment: dict) -> subprocess.Popen:
    return subprocess.Popen([*map(str, command)], text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def await_bytes(sluice: Path, environment: dict, job: subprocess.Popen, least: int) -> None:
    """Until the job has so much of the pool."""
    while job.poll() is None:
        done = subprocess.run([sluice, "status", "--json"], text=True, capture_output=True, check=False, env=environment)
        if done.returncode == 0 and any(one["bytes"] >= least for one in json.loads(done.stdout)["clients"]):
            return
        time.sleep(0.1)


class Parker:
    """A server that takes memory from the job until `end`."""

    def __init__(self, build: Path, environment: dict, least: int, most: int):
        self.process = subprocess.Popen(
            [build / "bin" / "sluice-bench-parker", "--least", str(least), "--most", str(most), "--count", "1000000", "--hold-ms", "20",
             "--apart-ms", "60"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


@pytest.mark.parametrize("mode", STEPS)
def test_losses_are_those_of_an_undisturbed_job(mode, sluice, build, tmp_path):
    (tmp_path / "runtime").mkdir(mode=0o700)
    environment = {**os.environ, "SLUICE_RUNTIME_DIR": str(tmp_path / "runtime")}
    steps = STEPS[mode] * PARKS
    command = [sys.executable, TRAINING, mode, steps]
    alone = ended(start([*command, tmp_path / "alone.json"], environment), tmp_path / "alone.json")
    job = start([sluice, "run", "--backend", "cuda", "--memory", "6GiB", "--host-memory", "6GiB", "--require-pool", "--", *command,
                 tmp_path / "shared.json", "--fill", "1"], environment)
    await_bytes(sluice, environment, job, GIB)
    parker = Parker(build, environment, 5 * GIB + GIB // 2, 6 * GIB)
    try:
        shared = ended(job, tmp_path / "shared.json")
    finally:
        parker.end()
        job.kill()
    print(f"{mode}: {parker.parks()} parks, {shared['seconds']:.1f} s beside {alone['seconds']:.1f} s")
    assert shared["losses"] == alone["losses"]
    assert parker.parks() >= PARKS, [one for one in parker.taken if one["refused"]][:3]
