"""The gate under an unmodified torch on a real GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

JOB = Path(__file__).with_name("gate_job.py")


def run(build: Path, mode: str, gated: bool = True) -> dict:
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("SLUICE_RUN", "LD_PRELOAD")}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch's deterministic algorithms ask for it
    if gated:
        environment["LD_PRELOAD"] = str(build / "lib" / "libsluice_gate.so")
    done = subprocess.run([sys.executable, JOB, mode], env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deadline(300)
def test_training_under_the_gate_has_the_same_losses(build):
    plain = run(build, "train", gated=False)
    gated = run(build, "train")
    assert plain["launches"] is None
    assert gated["launches"] > 40 * 20
    assert gated["losses"] == plain["losses"]


def test_every_kernel_of_a_training_step_passes_the_gate(build):
    result = run(build, "bypass")
    assert result["seen"] >= result["on_device"] > 20


@pytest.mark.deadline(300)
def test_compiled_functions_run_and_are_seen(build):
    result = run(build, "compile")
    assert result["close"]
    assert result["launches"] > 0


def test_graphs_are_captured_and_replayed_under_a_window(build):
    result = run(build, "graph")
    assert result["sums"] == [3000.0, 6000.0, 9000.0]
    assert result["counted"]


def test_a_closed_gate_holds_every_launch(build):
    result = run(build, "hold")
    assert result["held"]
    assert result["launches"] > 100


def test_refused_launches_raise_and_the_next_step_is_right(build):
    result = run(build, "abort")
    assert result["raised"] == 10
    assert result["finite"]
