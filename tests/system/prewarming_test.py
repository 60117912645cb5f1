"""A server has a model gone between requests that a timer sends, and warm before the next one; where that would cost others, it waits to be asked.

What comes of it is read from the server's own counts. A machine that is busy may miss a bunch: the timer goes on until enough were as they should be.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from host_parking_test import may_hold_pages
from metrics_test import Metrics
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import Server, World, floats

HOLDER = Path(__file__).with_name("holding_job.py")
PERIOD_SECONDS = 4.0
NEEDED_BUNCHES = 8  # before there is a period (scheduler/periods.hpp)
MOST_BUNCHES = 40
POOL = 400  # MiB
WEIGHTS = 256  # MiB, which take longer than the promise allows
HOLDS = 192  # MiB, beside which the weights have no room
X = torch.ones(1, 3)


def policy_of(world: World) -> Path:
    world.models.add("affine", Affine(padding_mib=WEIGHTS), **AFFINE)
    path = world.folder / "policy.yaml"
    path.write_text(f"""version: 1
server: {{model_repository: {world.models.root}}}
pool: {{backend: host, memory: {POOL}MiB}}
host_copies: {{memory: {POOL}MiB}}
training: {{stay: 1}}
scheduler: {{tick: 20ms}}
models:
  - {{name: affine, slo: {{percentile: 90%, attainment: 50%, latency: 80ms}}, warm: {{mode: auto, min_idle: 100ms}}}}
""", encoding="utf-8")
    return path


def counts(server: Server) -> dict:
    """Of the model, and how many requests have found it cold, or still being loaded."""
    status = server.status()
    model = next(each for each in status["models"] if each["name"] == "affine")
    names = ("requests", "prewarms", "prewarms_used", "prewarms_omitted", "cold_starts")
    return {**{name: model[name] for name in names}, "found_cold": status["latency_ms"]["cold"]["n"], "queue": model["queue"]}


class Timer:
    """Asks once each period, whatever has come of it before; what has risen of the counts each time."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def bunches(self, server: Server, most: int = MOST_BUNCHES):
        before = counts(server)
        for _ in range(most):
            passed = math.floor((time.monotonic() - self.began) / PERIOD_SECONDS)
            time.sleep(max(0.0, self.began + (passed + 1) * PERIOD_SECONDS - time.monotonic()))
            eventually(lambda: self.is_answered(server), "it is served")
            after = eventually(lambda: (seen := counts(server))["queue"] == 0 and seen, "it has been counted")
            yield {name: after[name] - before[name] for name in after}
            before = after

    @staticmethod
    def is_answered(server: Server) -> bool:
        status, answer = server.infer("affine", [floats("x", X)])
        assert status == 200 or (status == 503 and "have come back a moment ago" in answer["error"]), answer
        return status == 200


def is_prewarmed(risen: dict) -> bool:
    """It was loaded before it was asked for, and by nothing else; so it had gone after the last time."""
    return (risen["prewarms"], risen["prewarms_used"], risen["cold_starts"], risen["found_cold"]) == (1, 1, 0, 0)


def await_in_turn(wanted, bunches, count: int) -> None:
    """Until so many bunches in turn are as they are wanted."""
    seen = []
    for each in bunches:
        seen.append(each)
        if len(seen) >= count and all(wanted(one) for one in seen[-count:]):
            return
    pytest.fail("no such bunches: " + "\n".join(map(str, seen)))


@pytest.mark.deadline(900)
def test_a_model_that_a_timer_asks_for_is_gone_in_between_and_warm_when_it_is_asked_for_also_after_a_restart(world):
    policy = policy_of(world)
    server = world.serve(policy)
    timer = Timer()
    await_in_turn(is_prewarmed, timer.bunches(server), 3)
    seen = Metrics(server)
    model = server.model("affine")
    for name in ("prewarms", "prewarms_used", "prewarms_omitted"):
        assert seen.of(f"sluice_model_{name}_total", model="affine", version="1") <= model[name]
    assert model["prewarms_used"] >= 3

    assert server.end() == 0, server.log()
    second = world.serve(policy)
    assert second.model("affine")["requests"] == 0
    await_in_turn(is_prewarmed, timer.bunches(second, NEEDED_BUNCHES - 1), 1)  # which is known without having been seen again


@pytest.mark.skipif(not may_hold_pages(), reason="this user may not hold who touches pages (userfaultfd)")
@pytest.mark.deadline(900)
def test_a_job_is_parked_for_a_request_and_not_before_it(world, sluice):
    server = world.serve(policy_of(world))
    timer = Timer()
    await_in_turn(is_prewarmed, timer.bunches(server), 1)
    job = subprocess.Popen([sluice, "run", "--backend", "host", "--memory", f"{POOL}MiB", "--host-memory", f"{POOL}MiB", "--require-pool", "--name", "holder",
                            "--", sys.executable, HOLDER, str(HOLDS)],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def is_as_it_was() -> bool:
        """It needs its memory for that, and waits for it."""
        job.stdin.write("\n")
        job.stdin.flush()
        return job.stdout.readline() == "as it was\n"

    def parks() -> int:
        return world.job("holder")["parking"]["parks"]

    def bunches():
        before = parks()
        for risen in timer.bunches(server):
            after = parks()
            yield {**risen, "parks": after - before}
            assert is_as_it_was()
            before = after

    def is_parked_for_it(risen: dict) -> bool:
        """A prewarm was due, and left out."""
        return (risen["prewarms"], risen["prewarms_omitted"], risen["cold_starts"], risen["parks"]) == (0, 1, 1, 1)

    try:
        assert job.stdout.readline() == "holds\n"
        assert is_as_it_was()
        await_in_turn(is_parked_for_it, bunches(), 2)
        assert is_as_it_was()
    finally:
        job.stdin.close()
        job.wait(PATIENCE_SECONDS)
        job.stdout.close()
