"""Jobs that hardly have room: each goes on, or ends with a word on why; none waits or tries again without end."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

JOB = Path(__file__).with_name("crowded_job.py")


def start(sluice, runtime_folder, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sluice, "run", "--backend", "host", "--memory", "32MiB", "--runtime-dir", runtime_folder, "--require-pool", "--",
         sys.executable, JOB, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_two_jobs_that_fit_one_by_one_both_come_to_their_end(sluice, runtime_folder):
    jobs = [start(sluice, runtime_folder, 130) for _ in range(2)]
    for job in jobs:
        assert job.stdout.readline() == "ready\n", job.communicate()[1]
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    for job in jobs:
        said, complained = job.communicate()
        assert job.returncode == 0, complained
        assert said.startswith("done "), complained


@pytest.mark.parametrize("layers", [205, 212, 225])
def test_what_does_not_fit_beside_what_is_copied_for_it_is_told_at_once(sluice, runtime_folder, layers):
    job = start(sluice, runtime_folder, layers, "--queue")
    said, complained = job.communicate("go\n")
    said = said.removeprefix("ready\n")
    assert (job.returncode, "OutOfMemory" in complained) == (1, True) or said.startswith("done "), complained
