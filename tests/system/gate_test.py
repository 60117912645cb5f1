"""The preloaded gate in processes that have no CUDA driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCH_JOB = """
import torch
print(torch.cuda.is_available(), torch.cuda.device_count())
try:
    torch.ones(1, device="cuda")
except (RuntimeError, AssertionError) as problem:
    print(type(problem).__name__, str(problem).splitlines()[0])
print(torch.arange(4.0).sum().item())
"""


def run(build: Path, command: list[str], gated: bool) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("SLUICE_RUN", "LD_PRELOAD")}
    if gated:
        environment["LD_PRELOAD"] = str(build / "lib" / "libsluice_gate.so")
        environment["SLUICE_REAL_LIBCUDA"] = "/nonexistent/libcuda.so.1"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_torch_sees_no_gpu_and_says_no_more_than_without_the_gate(build):
    pytest.importorskip("torch")
    status, output, complaints = run(build, [sys.executable, "-c", TORCH_JOB], gated=True)
    assert status == 0, complaints
    lines = output.splitlines()
    assert lines[0] == "False 0"
    assert lines[1].startswith("RuntimeError")
    assert lines[2] == "6.0"
    if not Path("/proc/driver/nvidia").exists():
        assert (status, output, complaints) == run(build, [sys.executable, "-c", TORCH_JOB], gated=False)


def test_programs_without_cuda_do_not_notice_it(build):
    for command in (["true"], ["sh", "-c", "exit 7"], ["sh", "-c", "echo a; echo b >&2"]):
        assert run(build, command, gated=True) == run(build, command, gated=False)
