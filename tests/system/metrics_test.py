"""What a server says of itself and of the requests that it has had: Triton's statistics, and metrics."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from pauses_test import training
from server_models import AFFINE, SLOW, Affine, Raising, Slow
from serving import floats, integer

X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
LONG = 2000
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


class Metrics(dict):
    """Of one scrape: values by name and labels. Every line is parsed."""

    def __init__(self, server) -> None:
        parser = pytest.importorskip("prometheus_client.parser")
        with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_SECONDS) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            text = answer.read().decode()
        self.types = {}
        for family in parser.text_string_to_metric_families(text):
            assert family.documentation and family.type in ("counter", "gauge", "histogram") and family.samples, family
            assert family.type != "counter" or not family.name.startswith("sluice_") or all(
                each.name.endswith("_total") for each in family.samples), family
            self.types[family.name] = family.type
            for each in family.samples:
                # Triton's counters have no such suffix, and the parser adds it.
                name = each.name.removesuffix("_total") if each.name.startswith("nv_") else each.name
                key = (name, frozenset(each.labels.items()))
                assert key not in self, f"{key} is there twice"
                self[key] = each.value
        assert len(self) == sum(1 for line in text.splitlines() if not line.startswith("#"))

    def of(self, name: str, **labels: str) -> float:
        return self[name, frozenset(labels.items())]

    def sums(self, name: str) -> float:
        return sum(value for (each, _), value in self.items() if each == name)


def test_metrics_are_those_of_the_requests_that_were_sent(world):
    world.models.add("affine", Affine(padding_mib=8), **AFFINE)
    world.models.add("raising", Raising(), **RAISING)
    server = world.serve(world.policy("affine", "raising"))
    before = Metrics(server)
    affine = {"model": "affine", "version": "1"}
    raising = {"model": "raising", "version": "1"}
    assert before.of("nv_inference_request_success", **affine) == 0
    assert before.of("sluice_model_state", state="cold", **affine) == 1, "a scrape wakes nobody"
    for _ in range(4):
        server.outputs("affine", [floats("x", X)])
    for _ in range(3):
        assert server.infer("raising", [floats("x", X)])[0] == 500
    now = Metrics(server)
    stats = statistics(server, "/v2/models/affine/stats")[0]
    assert now.of("nv_inference_request_success", **affine) == 4
    assert now.of("nv_inference_count", **affine) == 4 * len(X)
    assert now.of("nv_inference_exec_count", **affine) == 4
    for name, field in {"request": "success", "queue": "queue", "compute_infer": "compute_infer"}.items():
        assert now.of(f"nv_inference_{name}_duration_us", **affine) == pytest.approx(stats["inference_stats"][field]["ns"] / 1000)
    took = {start: now.of("sluice_request_duration_seconds_count", start=start, **affine) for start in ("warm", "cold")}
    assert took == {"warm": 3, "cold": 1}
    assert now.of("sluice_request_duration_seconds_bucket", start="cold", le="+Inf", **affine) == 1
    assert now.of("nv_inference_request_failure", reason="BACKEND", **raising) == 3
    assert now.sums("nv_inference_request_failure") == 3
    assert now.sums("nv_inference_pending_request_count") == 0

    assert now.of("sluice_model_state", state="warm", **affine) == 1
    assert now.of("sluice_model_state", state="cold", **affine) == 0
    assert now.of("sluice_model_cold_starts_total", **affine) == 1
    assert now.of("sluice_executor_starts_total") == 1 and now.sums("sluice_executor_ends_total") == 0
    assert now.of("sluice_server_ready") == 1
    status, pool = server.status(), world.status()
    model = server.model("affine")
    assert now.of("sluice_model_weights_bytes", **affine) == model["bytes"]
    for which in ("required", "predicted"):  # each tick of the scheduler has others
        assert 0 <= now.of(f"sluice_model_attainment_{which}_ratio", **affine) <= 1
    observed = ("sluice_model_attainment_observed_ratio", frozenset(affine.items()))
    eventually(lambda: observed in Metrics(server), "a tick has seen them")
    assert 0 <= Metrics(server)[observed] <= 1
    assert now.sums("sluice_pool_bytes") == pool["pool"]["bytes"]
    assert now.of("sluice_pool_bytes", owner="serving") == pool["pool"]["serving_bytes"] > 0
    assert now.of("sluice_pool_handovers_total") == pool["handovers"]["count"]
    assert now.of("sluice_pool_handed_over_bytes_total", to="serving") == pool["handovers"]["bytes_to_serving"]
    assert now.of("sluice_training_pauses_total") <= status["pauses"]["count"]
    for key in before.keys() & now.keys():
        if key[0].endswith("_total"):
            assert now[key] >= before[key], key


def test_metrics_count_what_waits_and_what_computes_apart(world):
    world.models.add("slow", Slow(), **SLOW)
    server = world.serve(world.policy("slow"))
    server.outputs("slow", [integer("n", 1)])
    slow = {"model": "slow", "version": "1"}

    def two_wait() -> bool:
        threads = [threading.Thread(target=server.infer, args=("slow", [integer("n", LONG)])) for _ in range(3)]
        for each in threads:
            each.start()
        seen = set()
        while any(each.is_alive() for each in threads):
            seen.add(Metrics(server).of("nv_inference_pending_request_count", **slow))
        assert seen <= {0, 1, 2}, "one is computed"
        return 2 in seen

    eventually(two_wait, "one is computed, two wait")
    assert Metrics(server).of("nv_inference_pending_request_count", **slow) == 0


def test_metrics_are_there_while_no_executor_is_and_count_on(world):
    world.models.add("affine", Affine(padding_mib=8), **AFFINE)
    server = world.serve(world.policy("affine"))
    server.outputs("affine", [floats("x", X)])
    os.kill(server.executor(), signal.SIGSTOP)
    stopped = Metrics(server)
    assert stopped.of("nv_inference_request_success", model="affine", version="1") == 1
    os.kill(server.executor(), signal.SIGKILL)
    eventually(lambda: Metrics(server).of("sluice_executor_ends_total", cause="killed") == 1, "its end is counted")
    server.outputs("affine", [floats("x", X)])
    after = Metrics(server)
    assert after.of("nv_inference_request_success", model="affine", version="1") == 2
    assert after.of("sluice_executor_starts_total") == 2


def test_metrics_say_what_training_has_and_has_lost(world):
    world.models.add("affine", Affine(padding_mib=8), **AFFINE)
    server = world.serve(world.policy("affine"))
    with training(world, "fitter"):
        seen, told = Metrics(server), world.job("fitter")
        labels = {"job": "fitter", "slot": str(told["slot"])}
        assert 0 < seen.of("sluice_training_commits_total", **labels) <= told["commits"]
        assert seen.of("sluice_training_discards_total", **labels) <= told["discards"]
        assert seen.of("sluice_training_discarded_seconds_total", **labels) <= told["discarded_us"] / 1e6
