"""What a server predicts of models that share its device, and what it says of a promise that it cannot keep."""

from __future__ import annotations

import subprocess

import pytest
import torch
from patience import eventually
from server_models import Affine, Slow
from serving import floats, integer, load_without_end

AFFINE = {"inputs": {"x": ("TYPE_FP32", [3])}, "outputs": {"y": ("TYPE_FP32", [2])}}
MISSED = "a model is predicted to miss its promise"
KEPT = "a model is predicted to keep its promise again"


@pytest.fixture
def models(world):
    world.models.add("affine", Affine(), **AFFINE)
    world.models.add("slow", Slow(), {"n": ("TYPE_INT64", [1])}, {"rounds": ("TYPE_INT64", [1])}, batched=False)


def test_a_model_is_predicted_beside_those_that_ask_for_the_device_too(world, models):
    server = world.serve(world.policy("affine", "slow", server="parallel_models: 1"))
    server.outputs("affine", [floats("x", torch.ones(1, 3))])
    eventually(lambda: server.model("affine")["predicted_by"] == "alone", "nobody else has asked")
    with load_without_end(server):
        eventually(lambda: server.model("affine")["predicted_by"] == "classes_in_turn", "the other is in its prediction")
        seen = server.model("slow")
        assert seen["predicted_by"] == "classes_in_turn"
        assert 0.0 <= seen["predicted_attainment"] <= 1.0
        assert 0.0 <= seen["predicted_uncorrected"] <= 1.0
        assert 0.0 < seen["predicted_half_width"] <= 1.0
        assert seen["admitted_share"] == 1.0
        assert "correction_log_odds" in seen


def test_a_promise_that_cannot_be_kept_is_told_once_and_so_is_its_end(world, models):
    policy = world.policy("slow")
    kept = policy.read_text(encoding="utf-8").replace("500ms", "30s")
    policy.write_text(kept.replace("latency: 30s", "latency: 1us"), encoding="utf-8")
    server = world.serve(policy)
    for _ in range(35):
        assert int(server.outputs("slow", [integer("n", 1)])[0]) == 1
    eventually(lambda: MISSED in server.log(), "it is told")
    seen = server.model("slow")
    assert seen["infeasible"]
    assert seen["observed_attainment"] == 0.0
    assert seen["would_do"]["latency_ms"] is None or seen["would_do"]["latency_ms"] > 0.001
    for _ in range(5):
        server.outputs("slow", [integer("n", 1)])
    eventually(lambda: server.model("slow")["observed_requests"] >= 40, "more ticks have passed")
    assert server.log().count(MISSED) == 1

    policy.write_text(kept, encoding="utf-8")
    done = subprocess.run([world.program, "policy", "reload"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eventually(lambda: not server.model("slow")["infeasible"], "the new promise is kept")
    assert server.model("slow")["would_do"] is None
    eventually(lambda: KEPT in server.log(), "that is told, too")
    assert server.log().count(MISSED) == 1
