"""What training has beside a busy server: its share of the time, and the run-ahead that the server wants of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import Affine, Slow
from serving import World, floats, load_without_end

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from exactness import BENCHMARKS, environment  # noqa: E402

JOB = Path(__file__).with_name("paused_job.py")
REENTRANT = Path(__file__).with_name("reentrant_job.py")
SHARDS = BENCHMARKS / "exact_ranks_job.py"


@pytest.fixture
def slow(world):
    world.models.add("slow", Slow(), {"n": ("TYPE_INT64", [1])}, {"rounds": ("TYPE_INT64", [1])}, batched=False)


@contextlib.contextmanager
def training(world: World, name: str, command: tuple = (JOB,), **more: str):
    """A job of that name, once it has trained; `command` without the file that ends it."""
    until = world.folder / f"{name}-until"
    job = subprocess.Popen([world.program, "run", "--require-pool", "--name", name, "--", sys.executable, *command, until],
                           env={**os.environ, **more})
    try:
        eventually(lambda: (world.job(name) or {}).get("samples"), f"{name} trains")
        yield job
        until.touch()
        assert job.wait(PATIENCE_SECONDS) == 0
    finally:
        until.touch()
        job.kill()
        job.wait()


def test_a_job_goes_on_under_load_without_end(world, slow):
    server = world.serve(world.policy("slow", training="min_share: 50%"))
    with training(world, "job"), load_without_end(server):
        # Held until its share is due; then it trains although requests are in flight, again and again.
        for _ in range(3):
            before = server.status()["pauses"]["cut_short"]
            eventually(lambda: server.status()["pauses"]["cut_short"] > before, "a pause ends for the job's share")
            samples = world.job("job")["samples"]
            eventually(lambda: world.job("job")["samples"] > samples, "the job trains on")
            eventually(lambda: server.status()["requests"]["in_flight"] > 0, "requests are in flight")
        seen = world.status()
        assert seen["pauses"]["count"] >= seen["pauses"]["cut_short"] > 2
        assert seen["pauses"]["min_share"] == 0.5
        assert seen["pauses"]["held_share"] <= 0.5
        assert seen["pauses"]["held_s"] > 1.0
        assert seen["pauses"]["withheld_s"] > 0.0
        text = subprocess.run([world.program, "status"], capture_output=True, text=True, check=True).stdout
        assert "\ncompute pauses\n  count" in text
        assert "  50.0%  " in text
    assert server.status()["requests"]["failed"] == 0


def test_ranks_that_work_together_go_on_under_load_without_end(world, slow, tmp_path):
    """Each is paused by itself, also while it waits for the other."""
    server = world.serve(world.policy("slow", memory="192MiB", training="min_share: 50%"))
    out = tmp_path / "paused.json"
    with training(world, "ranks", (SHARDS, "--kind", "shards", "--out", out, "--until"), **environment()), load_without_end(server):
        before = server.status()["pauses"]["cut_short"]
        eventually(lambda: server.status()["pauses"]["cut_short"] >= before + 3, "pauses end for the job's share")
        samples = world.job("ranks")["samples"]
        eventually(lambda: world.job("ranks")["samples"] > samples, "the job trains on")
    paused = json.loads(out.read_text())
    subprocess.run([sys.executable, SHARDS, "--kind", "shards", "--steps", str(paused["steps"]), "--out", out], env=environment(),
                   check=True)
    undisturbed = json.loads(out.read_text())
    assert paused["shared"] and not undisturbed["shared"]
    assert (paused["digest"], paused["losses"]) == (undisturbed["digest"], undisturbed["losses"])


def test_a_job_without_a_share_is_paused_as_long_as_requests_are_in_flight(world, slow):
    server = world.serve(world.policy("slow", training="min_share: 0%"))
    with training(world, "job"):
        with load_without_end(server):
            eventually(lambda: server.status()["pauses"]["held_s"] > 1.2, "the job is paused")
            seen = server.status()["pauses"]
            assert (seen["cut_short"], seen["withheld_s"]) == (0, 0.0)
        samples = world.job("job")["samples"]
        eventually(lambda: world.job("job")["samples"] > samples, "the job goes on after the last request")


def test_no_demand_waits_for_a_thread_that_its_own_pause_holds(world):
    """Such a thread would be held until the request has failed: training has no share that would end the pause."""
    module = world.models.add("large", Affine(padding_mib=44), {"x": ("TYPE_FP32", [3])}, {"y": ("TYPE_FP32", [2])})
    server = world.serve(world.policy("large", idle="20ms", training="pause: on_cold_start, min_share: 0%"))
    x = torch.randn(1, 3)
    with training(world, "job", (REENTRANT,)):
        for loads in range(1, 21):
            assert torch.allclose(server.outputs("large", [floats("x", x)])[0], module(x))
            assert server.model("large")["cold_starts"] == loads
            eventually(lambda: server.model("large")["state"] == "cold", "it is released")
        assert world.job("job")["discards"] > 0


def test_jobs_keep_the_run_ahead_that_the_server_publishes(world, slow):
    first = world.serve(world.policy("slow", training="run_ahead: 70us"))
    with training(world, "follows"), training(world, "has_its_own", SLUICE_RUN_AHEAD_US="450"):
        eventually(lambda: world.job("follows")["run_ahead_us"] == 70.0, "the job hears of the bound")
        assert world.job("has_its_own")["run_ahead_us"] == 450.0
        assert world.pool()["run_ahead_us"] == 70.0

        first.process.kill()
        first.process.wait()
        eventually(lambda: world.job("follows")["run_ahead_us"] is None, "without a server nothing is bounded")
        eventually(lambda: world.job("has_its_own")["run_ahead_us"] is None, "also not by the job itself")
        assert world.pool()["run_ahead_us"] is None

        second = world.serve(world.policy("slow"))  # 500 ms, so that the bound is as large as it gets
        eventually(lambda: world.job("follows")["run_ahead_us"] == 1000.0, "the bound follows the promise")
        assert world.pool()["run_ahead_us"] == 1000.0
        assert second.end() == 0
        eventually(lambda: world.job("follows")["run_ahead_us"] is None, "a server that ends takes its bound along")
