"""What a server says of the requests that it has had: Triton's statistics."""

from __future__ import annotations

import os
import signal
import time

import torch
from server_models import AFFINE, Affine, Raising
from serving import floats

X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
RAISING = {**AFFINE, "outputs": {"y": ("TYPE_FP32", [3])}}


def statistics(server, path: str) -> list[dict]:
    status, answer = server.request(path)
    assert status == 200, answer
    return answer["model_stats"]


def test_statistics_are_those_of_the_requests_that_were_sent(world):
    world.models.add("affine", Affine(), **AFFINE)
    world.models.add("raising", Raising(), **RAISING)
    server = world.serve(world.policy("affine", "raising"))
    began = time.time()
    taken = 0.0
    for _ in range(5):
        since = time.monotonic()
        server.outputs("affine", [floats("x", X)])
        taken += time.monotonic() - since
    for _ in range(3):
        assert server.infer("raising", [floats("x", X)])[0] == 500
    assert server.infer("affine", [])[0] == 400, "wrong requests do not come to a model"

    (affine,) = statistics(server, "/v2/models/affine/stats")
    assert statistics(server, "/v2/models/affine/versions/1/stats") == [affine]
    assert (affine["name"], affine["version"]) == ("affine", "1")
    assert (affine["inference_count"], affine["execution_count"]) == (5 * len(X), 5)
    assert began * 1000 - 1 <= affine["last_inference"] <= time.time() * 1000 + 1
    stats = affine["inference_stats"]
    assert {name: each["count"] for name, each in stats.items()} == {
        "success": 5, "fail": 0, "queue": 5, "compute_input": 0, "compute_infer": 5, "compute_output": 0, "cache_hit": 0,
        "cache_miss": 0}
    assert 0 < stats["compute_infer"]["ns"] < stats["success"]["ns"] < taken * 1e9
    assert stats["queue"]["ns"] + stats["compute_infer"]["ns"] <= stats["success"]["ns"]

    assert [each["name"] for each in statistics(server, "/v2/models/stats")] == ["affine", "raising"]
    (raising,) = statistics(server, "/v2/models/raising/stats")
    assert raising["inference_stats"]["fail"]["count"] == 3 and raising["execution_count"] == 0
    assert server.request("/v2/models/nobody/stats")[0] == 404
    assert server.request("/v2/models/affine/versions/7/stats")[0] == 404
    assert "statistics" in server.request("/v2")[1]["extensions"]


def test_a_model_named_stats_is_reached_as_with_triton(world):
    world.models.add("stats", Affine(), **AFFINE)
    world.models.add("affine", Affine(), **AFFINE)
    server = world.serve(world.policy("stats", "affine"))
    server.outputs("stats", [floats("x", X)])
    assert {each["name"]: each["execution_count"] for each in statistics(server, "/v2/models/stats")} == {"stats": 1, "affine": 0}
    assert [each["name"] for each in statistics(server, "/v2/models/stats/stats")] == ["stats"]
    assert server.request("/v2/models/stats/versions/1")[1]["name"] == "stats"


def test_statistics_outlive_the_executor(world):
    world.models.add("affine", Affine(), **AFFINE)
    server = world.serve(world.policy("affine"))
    server.outputs("affine", [floats("x", X)])
    before = server.executor()
    os.kill(before, signal.SIGKILL)
    server.outputs("affine", [floats("x", X)])
    assert server.executor() != before
    assert statistics(server, "/v2/models/affine/stats")[0]["execution_count"] == 2
