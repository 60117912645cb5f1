"""`sluice serve` on a GPU: launches are watched, and what ends its executor ends nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

from executor_test import published  # noqa: E402
from patience import eventually  # noqa: E402
from server_models import AFFINE, FILLING, SLOW, Affine, Filling, Slow  # noqa: E402
from server_test import taken_over  # noqa: E402
from serving import Server, World, floats, integer  # noqa: E402

X = torch.tensor([[0.5, -1.0, 2.0]])
PADDING_MIB = 256


class Outside(torch.nn.Module):
    """Reads beyond a table: an assertion of the kernel's, after which its process can use the GPU for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(4, 1))

    def forward(self, n: int) -> torch.Tensor:
        return self.table[torch.full([1], n, dtype=torch.int64, device=self.table.device)].sum().to(torch.int64).reshape(1)


class GpuWorld(World):
    def policy(self, *models: str, more_training: str = "", idle: str = "10m") -> Path:
        path = super().policy(*models, training=more_training, server="request_timeout: 5s", idle=idle)
        text = path.read_text(encoding="utf-8").replace("backend: host, memory: 64MiB", "backend: cuda, memory: 4GiB")
        path.write_text(text, encoding="utf-8")
        return path


@pytest.fixture
def world(sluice, tmp_path):
    made = GpuWorld(sluice, tmp_path)
    yield made
    made.end()


def check(server: Server, model: Affine) -> None:
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], model(X), rtol=1e-4, atol=1e-4)


@pytest.fixture
def serving(world):
    """A server with a warm model that lies in its pool, and another that can break its process."""
    affine = world.models.add("affine", Affine(padding_mib=PADDING_MIB), **AFFINE)
    world.models.add("idle", Affine(seed=1, padding_mib=PADDING_MIB), **AFFINE)
    world.models.add("outside", Outside(), **SLOW)
    world.models.add("slow", Slow(), **SLOW)
    server = world.serve(world.policy("affine", "idle", "outside", "slow"))
    check(server, affine)
    server.outputs("idle", [floats("x", X)])
    eventually(lambda: published(server), "it is published")
    return server, affine


class Load:
    """A client that asks the good model again and again; no answer may be wrong, nor missing for long."""

    def __init__(self, server: Server, model: Affine) -> None:
        self._server, self._wanted = server, model(X)
        self._ends = threading.Event()
        self.wrong: list[object] = []
        self.longest_s = 0.0
        self.answers = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        eventually(lambda: self.answers > 3, "answers come")
        return self

    def __exit__(self, *_why: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            began = time.monotonic()
            status, answer = self._server.infer("affine", [floats("x", X)])
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            got = torch.tensor(answer["outputs"][0]["data"]) if status == 200 else None
            if got is None or not torch.allclose(got, self._wanted.flatten(), rtol=1e-4, atol=1e-4):
                self.wrong.append(answer)
            self.answers += 1


def test_bursts_of_launches_claim_the_device_and_idle_time_does_not(serving):
    server, affine = serving
    before = server.status()["pauses"]
    for _ in range(20):
        check(server, affine)
    after = server.status()["pauses"]
    assert "the gate is not in this process" not in server.log() and "cannot be watched" not in server.log()
    assert after["busy_s"] > before["busy_s"]
    assert after["count"] > before["count"]
    eventually(lambda: server.status()["pauses"]["held_share"] == 0.0, "nothing is claimed without work")


@pytest.mark.parametrize("breaks", ["kill", "sticky", "hang"])
def test_another_model_is_answered_though_the_executor_ends(serving, breaks):
    server, affine = serving
    former = server.executor()
    with Load(server, affine) as load:
        if breaks == "kill":
            os.kill(former, signal.SIGKILL)
        elif breaks == "sticky":
            status, answer = server.infer("outside", [integer("n", 1000)])
            assert status == 500, answer
        else:
            began = time.monotonic()
            status, answer = server.infer("slow", [integer("n", 10**12)])
            print(json.dumps({"hung_request_s": time.monotonic() - began}), file=sys.stderr)
            assert status == 504, answer
        eventually(lambda: (seen := server.status()["executor"])["state"] == "ready" and seen["pid"] != former,
                   "another executor serves")
        answered = load.answers
        eventually(lambda: load.answers > answered + 3, "answers come")
    assert not load.wrong
    print(json.dumps({"breaks": breaks, "longest_s": load.longest_s}), file=sys.stderr)
    assert taken_over(server)["idle"][1] == 0, "what computed nothing at the time is not copied"
    assert "affine" in taken_over(server)
    assert server.outputs("outside", [integer("n", 1)])[0].item() == 1


def test_a_server_that_is_replaced_leaves_its_models_warm_to_the_next(world, serving):
    server, affine = serving
    server.process.send_signal(signal.SIGUSR2)
    assert server.process.wait(60) == 0
    successor = world.serve(world.folder / "policy.yaml")
    check(successor, affine)
    assert taken_over(successor)["affine"][1] == 0
    assert successor.model("affine")["cold_starts"] == 0


def test_models_come_and_go_while_others_compute(world, serving):
    server, affine = serving
    more = world.models.add("more", Affine(seed=2, padding_mib=PADDING_MIB), **AFFINE)
    executor = server.executor()

    def reload(*models: str) -> str:
        world.policy(*models)
        done = subprocess.run([world.program, "policy", "reload"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with Load(server, affine) as load:
        for _ in range(3):
            assert reload("affine", "idle", "outside", "slow", "more") == "added more\n"
            torch.testing.assert_close(server.outputs("more", [floats("x", X)])[0], more(X), rtol=1e-4, atol=1e-4)
            assert reload("affine", "idle", "outside", "slow") == "removed more\n"
        answered = load.answers
        eventually(lambda: load.answers > answered + 3, "answers come")
    assert not load.wrong
    print(json.dumps({"reloads": True, "longest_s": load.longest_s}), file=sys.stderr)
    assert server.executor() == executor and server.model("idle")["cold_starts"] == 1


def test_what_computations_need_comes_out_of_the_pool(world):
    world.models.add("filling", Filling(), **FILLING)
    affine = world.models.add("affine", Affine(padding_mib=PADDING_MIB), **AFFINE)
    server = world.serve(world.policy("filling", "affine"))
    executor = server.executor()
    check(server, affine)

    def fill(mib: int) -> None:
        assert int(server.outputs("filling", [integer("mib", mib)])[0]) == mib * 2**18

    fill(1)
    before = world.pool()["serving_bytes"]
    fill(1024)
    assert world.pool()["serving_bytes"] >= before + 1024 * 2**20
    assert 1024 * 2**20 <= server.model("filling")["activation_bytes"] < 1100 * 2**20
    for mib in (20 * 1024, 5 * 1024):
        status, answer = server.infer("filling", [integer("mib", mib)])
        assert status == 503, answer
        assert "out of memory" in answer["error"], answer
        check(server, affine)
    fill(3 * 1024)  # torch gives back what it kept of the smaller ones
    eventually(lambda: world.pool()["serving_bytes"] <= before + 64 * 2**20, "it goes back when nobody computes")
    assert server.executor() == executor
