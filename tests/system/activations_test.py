"""What models' computations need of memory comes out of the pool: it is counted there, bounded by it, and goes back to it."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from patience import eventually
from pauses_test import JOB, training
from server_models import AFFINE, FILLING, Affine, Filling
from serving import Server, floats, integer

MIB = 2**20
POOL = "64MiB"


@pytest.fixture
def models(world) -> Affine:
    world.models.add("filling", Filling(), **FILLING)
    return world.models.add("affine", Affine(padding_mib=1), **AFFINE)


def fill(server: Server, mib: int) -> None:
    assert int(server.outputs("filling", [integer("mib", mib)])[0]) == mib * MIB // 4


def refusal(server: Server, mib: int) -> tuple[int, str]:
    status, answer = server.infer("filling", [integer("mib", mib)])
    return status, answer["error"]


def serving_bytes(world) -> int:
    return world.pool()["serving_bytes"]


def test_a_computation_that_the_pool_cannot_have_is_refused_and_harms_nobody(world, models):
    server = world.serve(world.policy("filling", "affine", memory=POOL))
    executor = server.executor()
    x = torch.tensor([[0.5, -1.0, 2.0]])
    for mib in (20 * 1024, 65):
        status, why = refusal(server, mib)
        assert status == 503, why
        assert "out of memory: a computation needs " + ("20 GiB" if mib > 65 else "65 MiB") in why, why
        assert "the pool has 64 MiB" in why and "pool.memory" in why, why
        torch.testing.assert_close(server.outputs("affine", [floats("x", x)])[0], models(x))
    assert serving_bytes(world) < 8 * MIB, "a computation that was refused keeps nothing"
    fill(server, 16)
    assert server.executor() == executor


def test_what_computations_need_is_the_pools_and_shown(world, models):
    server = world.serve(world.policy("filling", memory=POOL))
    before = serving_bytes(world)
    fill(server, 16)
    assert serving_bytes(world) >= before + 16 * MIB
    assert server.model("filling")["activation_bytes"] == 16 * MIB
    fill(server, 4)
    assert server.model("filling")["activation_bytes"] == 16 * MIB


def test_what_is_kept_goes_back_when_its_model_does(world, models):
    server = world.serve(world.policy("filling", memory=POOL, idle="300ms"))
    before = serving_bytes(world)
    fill(server, 16)
    eventually(lambda: server.model("filling")["state"] == "cold", "the model is released")
    eventually(lambda: serving_bytes(world) == before, "what its computation needed has gone back")
    fill(server, 16)


def test_what_is_kept_makes_room_for_another_models_weights(world, models):
    world.models.add("large", Affine(padding_mib=50), **AFFINE)
    server = world.serve(world.policy("filling", "large", memory=POOL))
    fill(server, 24)
    assert server.outputs("large", [floats("x", torch.zeros(1, 3))])
    assert server.model("filling")["state"] == "warm"


def test_training_gives_what_a_computation_needs_and_has_it_back(world, models):
    server = world.serve(world.policy("filling", memory="256MiB", idle="300ms"))
    rows = 2**20  # their own 64 MiB stay; a micro-batch has more than that
    with training(world, "trained", (JOB, str(rows))):
        for _ in range(3):
            eventually(lambda: world.pool()["training_bytes"] >= 64 * MIB, "training has most of the pool")
            fill(server, 160)
            eventually(lambda: server.model("filling")["state"] == "cold", "the model is released")


def test_an_executor_that_is_killed_leaves_none_of_it(world, models):
    server = world.serve(world.policy("filling", memory=POOL))
    before = serving_bytes(world)
    fill(server, 32)
    os.kill(server.executor(), signal.SIGKILL)
    eventually(lambda: serving_bytes(world) < before + 32 * MIB, "its memory has gone back")
    fill(server, 48)


def test_what_one_model_needed_goes_back_while_another_is_asked(world, models):
    server = world.serve(world.policy("filling", "affine", memory=POOL))
    x = torch.zeros(1, 3)
    fill(server, 32)
    assert serving_bytes(world) >= 32 * MIB

    def given_back() -> bool:
        server.outputs("affine", [floats("x", x)])
        return serving_bytes(world) < 16 * MIB

    eventually(given_back, "it has gone back")
    assert server.model("filling")["state"] == "warm"
