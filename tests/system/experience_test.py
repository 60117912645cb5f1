"""What a server has learnt of its models is there when it starts again, however it has ended."""

from __future__ import annotations

import json
import os
import random
import signal
import zlib
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import Affine
from serving import floats

AFFINE = {"inputs": {"x": ("TYPE_FP32", [3])}, "outputs": {"y": ("TYPE_FP32", [2])}}
REQUESTS = 40
NOT_USED = "what an earlier server has learnt of models is not used"


@pytest.fixture
def policy(world):
    world.models.add("affine", Affine(), **AFFINE)
    return world.policy("affine")


def experience() -> Path:
    return Path(os.environ["SLUICE_RUNTIME_DIR"]) / "server-0.experience"


def written() -> int:
    """Answers that the file has."""
    if not experience().exists():
        return 0
    kept = json.loads(experience().read_text().partition("\n")[2])
    return sum(requests for model in kept["models"] for requests, _ in model["learnt"]["attained"]["seen"])


def learn(server) -> dict:
    for _ in range(REQUESTS):
        server.outputs("affine", [floats("x", torch.ones(1, 3))])
    return eventually(lambda: (seen := server.model("affine"))["observed_requests"] == REQUESTS and seen, "it has seen them all")


def gone(world) -> bool:
    return not any(each["kind"] == "server" for each in world.status()["clients"])


def known(server) -> dict:
    """What a server knows that nobody has asked yet."""
    seen = server.model("affine")
    assert seen["requests"] == 0
    return seen


def test_a_server_that_was_killed_knows_at_once_what_it_had_learnt(world, policy):
    server = world.serve(policy)
    assert known(server)["arrival_rate_per_s"] == 0
    before = learn(server)
    eventually(lambda: written() > 0, "it has been written down")
    server.outputs("affine", [floats("x", torch.ones(1, 3))])
    eventually(lambda: written() == REQUESTS + 1, "with the last request")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    eventually(lambda: gone(world), "the broker has noticed")
    second = world.serve(policy)
    seen = known(second)
    assert seen["observed_requests"] == REQUESTS + 1
    assert seen["arrival_rate_per_s"] > 0
    assert seen["load_ms"] == pytest.approx(before["load_ms"])
    assert NOT_USED not in second.log()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR2])
def test_a_server_that_ends_or_is_replaced_leaves_what_it_has_learnt(world, policy, how):
    server = world.serve(policy)
    learn(server)
    server.process.send_signal(how)
    assert server.process.wait(PATIENCE_SECONDS) == 0, server.log()
    eventually(lambda: gone(world), "the broker has noticed")
    assert known(world.serve(policy))["observed_requests"] == REQUESTS


def test_an_executor_that_takes_anothers_place_knows_what_that_had_learnt(world, policy):
    server = world.serve(policy)
    learn(server)
    eventually(lambda: written() > 0, "it has been written down")
    server.outputs("affine", [floats("x", torch.ones(1, 3))])
    eventually(lambda: written() == REQUESTS + 1, "with the last request")
    former = server.executor()
    os.kill(former, signal.SIGKILL)
    eventually(lambda: server.executor() not in (former, None) and server.status()["executor"]["state"] == "ready", "another one serves")
    assert server.model("affine")["observed_requests"] == REQUESTS + 1


def test_a_model_that_has_changed_begins_anew(world, policy):
    server = world.serve(policy)
    learn(server)
    assert server.end() == 0
    os.utime(world.models.root / "affine" / "1" / "model.pt")  # by which a file is known
    changed = known(world.serve(policy))
    assert changed["observed_requests"] == 0
    assert changed["arrival_rate_per_s"] == 0


def damaged(text: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(text))
    return draw.choice([text[:place], b"", draw.randbytes(200), text[:place] + bytes([text[place] ^ 1]) + text[place + 1:]])


def test_a_damaged_file_is_told_once_and_the_server_begins_anew(world, policy):
    server = world.serve(policy)
    learn(server)
    assert server.end() == 0
    whole = experience().read_bytes()
    _, _, content = whole.partition(b"\n")
    assert f"crc32 {zlib.crc32(content):08x} bytes {len(content)}".encode() in whole
    draw = random.Random(7)
    for _ in range(4):
        experience().write_bytes(damaged(whole, draw))
        server = world.serve(policy)
        assert known(server)["observed_requests"] == 0
        assert server.log().count(NOT_USED) == 1
        server.process.kill()
        server.process.wait()
        eventually(lambda: gone(world), "the broker has noticed")
    experience().write_bytes(whole.replace(b"sluice-experience 2", b"sluice-experience 1", 1))
    server = world.serve(policy)
    assert "it is of version 1, and this server reads version 2" in server.log()
