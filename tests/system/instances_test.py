"""Models that compute several requests at once, with one copy of their weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from server_models import AFFINE, Affine, Counting
from serving import Server, World, floats

CLIENTS, REQUESTS = 6, 30
VECTORS = {"inputs": {"x": ("TYPE_FP32", [3])}, "outputs": {"y": ("TYPE_FP32", [3])}}


@pytest.fixture
def world(sluice, tmp_path):
    made = World(sluice, tmp_path)
    yield made
    made.end()


def wrong_answers(server: Server, model: str, reference) -> list[object]:
    """Of several clients that ask at once."""

    def ask(client: int) -> list[object]:
        inputs = [torch.tensor([[float(client), float(i), -1.0]]) for i in range(REQUESTS)]
        return [(client, x) for x in inputs
                if not torch.allclose(server.outputs(model, [floats("x", x)])[0], reference(x), rtol=1e-5, atol=1e-5)]

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(ask, range(CLIENTS)), [])


def test_instances_share_the_weights_and_answer_right(world):
    affine = world.models.add("affine", Affine(padding_mib=4), **AFFINE, more="instance_group { count: 4 }")
    server = world.serve(world.policy("affine"))
    assert not wrong_answers(server, "affine", affine)
    assert server.model("affine")["bytes"] < 5 * 2**20, "one copy"
    assert "one request or batch at a time" not in server.log()


def test_a_model_that_changes_itself_computes_one_request_at_a_time(world):
    world.models.add("counting", Counting(), **VECTORS, more="instance_group { count: 4 } optimization { cuda { graphs: true } }")
    server = world.serve(world.policy("counting"))
    assert not wrong_answers(server, "counting", lambda x: x + 1.0)
    assert "one request or batch at a time" in server.log()
    assert "it may write into 'count'" in server.log()


def test_a_count_that_cannot_be_leaves_its_model_out_with_the_place(world):
    affine = world.models.add("affine", Affine(), **AFFINE)
    world.models.add("wrong", Affine(), **AFFINE, more="instance_group { count: 100 }")
    server = world.serve(world.policy("affine"))
    assert not wrong_answers(server, "affine", affine)
    assert "there are 100 instances; there may be 64" in server.log()
