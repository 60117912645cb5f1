"""Batches and warm-ups of a server, as a model's configuration asks for them."""

from __future__ import annotations

import concurrent.futures
import threading

import torch
from patience import PATIENCE_SECONDS
from server_models import AFFINE, Affine, Raising
from serving import floats

DYNAMIC = {"max_batch_size": 8,
           "more": "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: [ 4, 8 ] }"}
WARMUP = """
model_warmup { name: "some" batch_size: 3 count: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 3 ] random_data: true } } }
"""


def statistics(server, model: str) -> dict:
    status, answer = server.request(f"/v2/models/{model}/stats")
    assert status == 200, answer
    return answer["model_stats"][0]


def all_at_once(server, model: str, inputs: list[torch.Tensor]) -> list[tuple[int, dict]]:
    """The answers to that many clients."""
    ready = threading.Barrier(len(inputs))

    def ask(x: torch.Tensor) -> tuple[int, dict]:
        ready.wait(PATIENCE_SECONDS)
        return server.infer(model, [floats("x", x)])

    with concurrent.futures.ThreadPoolExecutor(len(inputs)) as clients:
        return list(clients.map(ask, inputs))


def test_requests_that_come_together_are_computed_together_and_answered_as_each_alone(world):
    model = Affine()
    world.models.add("affine", model, **AFFINE, **DYNAMIC)
    server = world.serve(world.policy("affine"))
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(rows, 3, generator=generator) for rows in (1, 2, 1)]
    for (status, answer), x in zip(all_at_once(server, "affine", inputs), inputs, strict=True):
        assert status == 200, answer
        (output,) = answer["outputs"]
        assert output["shape"] == [len(x), 2]
        torch.testing.assert_close(torch.tensor(output["data"]).view(len(x), 2), model(x).detach())
    seen = statistics(server, "affine")
    assert (seen["inference_count"], seen["execution_count"], seen["inference_stats"]["success"]["count"]) == (4, 1, 3)
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in seen["batch_stats"]] == [(4, 1)]


def test_who_sends_what_a_model_refuses_fails_alone(world):
    world.models.add("raising", Raising(), inputs={"x": ("TYPE_FP32", [3])}, outputs={"y": ("TYPE_FP32", [3])}, **DYNAMIC)
    server = world.serve(world.policy("raising"))
    inputs = [torch.full((1, 3), value) for value in (1.0, -1.0, 2.0, 3.0)]
    assert [status for status, _ in all_at_once(server, "raising", inputs)] == [200, 500, 200, 200]
    assert statistics(server, "raising")["execution_count"] == 3


def test_samples_of_a_warm_up_are_computed_before_the_server_is_ready(world):
    world.models.add("affine", Affine(), **AFFINE, max_batch_size=4, more=WARMUP)
    world.models.add("cold", Affine(), **AFFINE)
    server = world.serve(world.policy("affine", "cold"))
    assert (server.model("affine")["state"], server.model("affine")["cold_starts"]) == ("warm", 1)
    assert server.model("cold")["state"] == "cold"
    assert statistics(server, "affine")["inference_stats"]["success"]["count"] == 0
    assert server.status()["requests"]["total"] == 0
