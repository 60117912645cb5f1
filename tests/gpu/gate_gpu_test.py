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


#: Whether launches that find no room wait for it, or are left to the gate's submitter.
both_ways = pytest.mark.parametrize("more", [(), ("--deferred",)], ids=["direct", "deferred"])


def run(build: Path, mode: str, *more: str, gated: bool = True) -> dict:
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("SLUICE_RUN", "LD_PRELOAD")}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch's deterministic algorithms ask for it
    if gated:
        environment["LD_PRELOAD"] = str(build / "lib" / "libsluice_gate.so")
    done = subprocess.run([sys.executable, JOB, mode, *more], env=environment, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deadline(300)
@both_ways
def test_training_under_the_gate_has_the_same_losses(build, more):
    plain = run(build, "train", gated=False)
    gated = run(build, "train", *more)
    assert plain["launches"] is None
    assert gated["launches"] > 40 * 20
    assert gated["losses"] == plain["losses"]
    assert (gated["deferred"] > 0) == bool(more)


@pytest.mark.deadline(600)
def test_random_programs_show_the_same_with_and_without_the_gate(build):
    plain = run(build, "program", gated=False)
    assert run(build, "program")["digests"] == plain["digests"]
    deferred = run(build, "program", "--deferred")
    assert deferred["digests"] == plain["digests"]
    assert deferred["deferred"] > 1000


def test_every_kernel_of_a_training_step_passes_the_gate(build):
    result = run(build, "bypass")
    assert result["seen"] >= result["on_device"] > 20


@pytest.mark.deadline(300)
def test_compiled_functions_run_and_are_seen(build):
    result = run(build, "compile")
    assert result["close"]
    assert result["launches"] > 0


@both_ways
def test_graphs_are_captured_and_replayed_under_a_bound(build, more):
    result = run(build, "graph", *more)
    assert result["sums"] == [3000.0, 6000.0, 9000.0]
    assert result["counted"]


@both_ways
def test_a_closed_gate_holds_every_launch(build, more):
    result = run(build, "hold", *more)
    assert result["held"]
    assert result["launches"] > 100


@pytest.mark.deadline(120)
@both_ways
def test_no_kernel_runs_in_ten_thousand_pauses(build, more):
    result = run(build, "counter", *more)
    assert result["pauses"] == 10_000
    assert result["counted_in_pauses"] == 0
    assert result["counted"] == result["launched"] > 10_000


@both_ways
def test_what_is_longer_than_the_bound_is_known_by_name(build, more):
    name, microseconds, times = run(build, "units", *more)["units"][0]
    assert "elementwise_kernel" in name
    assert microseconds > 200
    assert 50 < times <= 100


@both_ways
def test_refused_launches_raise_and_the_next_step_is_right(build, more):
    result = run(build, "abort", *more)
    assert result["raised"] == 10
    assert result["finite"]


def test_a_job_that_has_lost_the_gate_says_so_and_trains(sluice, runtime_folder, checkout):
    program = ("import torch, sluice; model = torch.nn.Linear(4, 4).cuda(); "
               "step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1)); "
               "print(step.shared, step(lambda x: model(x).sum(), torch.ones(2, 4, device='cuda')).isfinite().item())")
    done = subprocess.run(
        [sluice, "run", "--backend", "cuda", "--memory", "1GiB", "--", "env", "-u", "LD_PRELOAD", sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(checkout / "runtime" / "python")}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "False True\n"
    assert "the gate is not in this process" in done.stderr
