"""Executors, spares and servers are killed at random while requests come: nobody is answered wrongly, and nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from executor_test import ended
from patience import eventually
from server_models import AFFINE, SLOW, Affine, Slow
from server_test import X
from serving import floats, integer

KILLS = [pytest.param(30, id="short"), pytest.param(1000, id="long", marks=[pytest.mark.long, pytest.mark.deadline(7200)])]
NO_ANSWER = (OSError, http.client.HTTPException)


def kill_what_may_have_ended(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Operator:
    """A server that is started again when it has died, as a service manager does it: the same policy and port."""

    def __init__(self, world, policy: Path) -> None:
        self._world, self._policy = world, policy
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.changes = 0  # odd: there is none that listens
        self.seen: set[int] = set()  # process ids
        self.server = self._start()

    def _start(self):
        server = self._world.start(self._policy, "--port", str(self._port))
        server.url = f"http://127.0.0.1:{self._port}"  # who asks does not wait until it listens
        return server

    def wait_until_listening(self) -> None:
        self.server.wait_until_listening()
        self.seen.add(self.server.process.pid)

    def kill_and_start(self) -> None:
        self.changes += 1
        self.server.process.kill()
        self.server.process.wait()
        log = self.server.log()
        self.server = self._start()
        try:
            self.server.wait_until_listening()
        except AssertionError as failure:
            raise AssertionError(f"{failure}\nthe one before it:\n{log}") from failure
        self.seen.add(self.server.process.pid)
        self.changes += 1

    def executor(self) -> dict:
        seen = self.server.status()["executor"]
        self.seen |= {seen["pid"], seen["spare_pid"]} - {None, 0}
        return seen

    def serving(self) -> dict | None:
        seen = self.executor()
        return seen if seen["state"] == "ready" else None

    def kill_executor(self, with_spare: bool) -> None:
        former = eventually(self.serving, "an executor serves")
        if with_spare and former["spare_pid"]:
            kill_what_may_have_ended(former["spare_pid"])
        os.kill(former["pid"], signal.SIGKILL)
        eventually(lambda: (now := self.serving()) and now["pid"] != former["pid"], "another executor serves")

    def kill_spare(self) -> None:
        kill_what_may_have_ended(eventually(lambda: self.executor()["spare_pid"], "there is a spare"))

    def is_promised(self, model: str) -> bool:
        return self.server.model(model)["outlives_server"]


def processes_of_folder(folder: str) -> list[int]:
    """Servers and executors whose runtime folder that is."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            program = os.readlink(each / "exe").rpartition("/")[2]
            if program.startswith(("sluice-server", "sluice-executor")) and folder.encode() in (each / "environ").read_bytes():
                found.append(int(each.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.parametrize("kills", KILLS)
def test_whatever_of_a_server_is_killed_under_load_answers_nobody_wrongly(world, runtime_folder, monkeypatch, kills):
    monkeypatch.setenv("SLUICE_SERVER_GRACE_MS", "60000")  # a machine that has much to do is no reason to copy
    affine = world.models.add("affine", Affine(padding_mib=1), **AFFINE)
    still = world.models.add("still", Affine(seed=1, padding_mib=2), **AFFINE)
    world.models.add("slow", Slow(), **SLOW)
    policy = world.policy("affine", "still", "slow")
    policy.write_text(policy.read_text().replace("server: {", "server: {request_timeout: 60s, "))
    operator = Operator(world, policy)
    operator.wait_until_listening()
    over = threading.Event()
    answered: list[int] = []

    def right(model: str, reference: Affine) -> None:
        torch.testing.assert_close(operator.server.outputs(model, [floats("x", X)])[0], reference(X), rtol=0, atol=0)

    def ask(number: int) -> None:
        before = operator.changes
        server = operator.server
        try:
            if number % 2:
                status, answer = server.infer("affine", [floats("x", X)])
                expected = affine(X).flatten().tolist()
            else:
                status, answer = server.infer("slow", [integer("n", number + 3)])
                expected = [number + 3]
        except NO_ANSWER:
            assert before % 2 or operator.changes != before, "a server that lives has left a client"
            return
        if status == 503 and (before % 2 or operator.changes != before):
            return  # it is starting
        assert status == 200, (status, answer)
        torch.testing.assert_close(torch.tensor(answer["outputs"][0]["data"]), torch.tensor(expected), rtol=0, atol=0)
        answered.append(number)

    def ask_again_and_again(number: int) -> None:
        while not over.is_set():
            ask(number)

    right("still", still)
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    done = {"executor": 0, "both": 0, "spare": 0, "server": 0}
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask_again_and_again, number) for number in range(4)]
        try:
            for _ in range(kills):
                before = len(answered)
                what = chance.choices(list(done), weights=[4, 1, 2, 3])[0]
                if chance.random() < 0.7:
                    eventually(lambda: operator.is_promised("still"), "it is published")
                is_promised = operator.is_promised("still")
                if what == "server":
                    assert operator.server.status()["requests"]["failed"] == 0
                    operator.kill_and_start()
                elif what == "spare":
                    operator.kill_spare()
                else:
                    operator.kill_executor(with_spare=what == "both")
                done[what] += 1
                seen = operator.server.model("still")
                if is_promised:
                    assert (seen["state"], seen["cold_starts"]) == ("warm", 0) or what == "spare", (what, seen)
                if seen["state"] != "warm":
                    right("still", still)
                eventually(lambda: len(answered) > before or any(each.done() for each in clients), "requests are answered")  # noqa: B023
                time.sleep(chance.random() * 0.05)  # not for order: where in a computation the next one falls
        finally:
            over.set()
        for each in clients:
            each.result()
    print(done)
    right("affine", affine)
    right("still", still)
    eventually(operator.serving, "an executor serves")
    seen = operator.server.status()["requests"]
    assert seen["failed"] == 0 and seen["in_flight"] == 0
    for each in world.servers:  # nothing was computed with it, so that nobody had reason to copy it
        copied = re.findall(r"took over a warm model model=still bytes=\d+ copied_bytes=(\d+)", each.log())
        assert set(copied) <= {"0"}, each.log()
    pool = world.pool()
    assert sum(pool[f"{owner}_bytes"] for owner in ("free", "dirty", "training", "serving", "engine", "left")) == pool["bytes"], pool
    assert operator.server.end() == 0
    pool = world.pool()
    assert pool["serving_bytes"] == 0 and pool["left_bytes"] == 0
    assert all(ended(each) for each in operator.seen) and not processes_of_folder(str(runtime_folder))
