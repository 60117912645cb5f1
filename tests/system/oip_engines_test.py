"""Engines that speak the Open Inference Protocol (`api: oip`), behind the server's own /v2, with Triton's client as it is."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from patience import PATIENCE_SECONDS, eventually
from serving import Server
from tritonclient.utils import InferenceServerException

PROGRAM = Path(__file__).with_name("engine_server.py")
X = np.array([1.0, -2.5, 3.0], dtype=np.float32)


@pytest.fixture
def server(world) -> Server:
    path = world.folder / "policy.yaml"
    path.write_text(f"""version: 1
server: {{request_timeout: 30s}}
pool: {{backend: host, memory: 64MiB}}
models:
  - {{name: vision, slo: {{latency: 2s}}, engine: {{command: [{sys.executable}, {PROGRAM}, --port, '{{port}}', --oip, 'resnet,vit'],
      ready: /health, api: oip, served_names: [resnet, vit]}}}}
  - {{name: other, slo: {{latency: 2s}}, engine: {{command: [{sys.executable}, {PROGRAM}, --port, '{{port}}', --oip, other],
      ready: /health, api: oip}}}}
""", encoding="utf-8")
    return world.serve(path)


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as made:
        yield made


def infer(client, model: str, **more) -> triton.InferResult:
    given = triton.InferInput("x", [len(X)], "FP32")
    given.set_data_from_numpy(X, binary_data=False)
    return client.infer(model, [given], outputs=[triton.InferRequestedOutput("y", binary_data=False)], **more)


def state(server: Server, name: str = "vision") -> dict:
    return next(each for each in server.status()["engines"] if each["name"] == name)


def seen_by(server: Server, name: str = "vision") -> dict:
    """Past the server."""
    host, _, port = state(server, name)["address"].partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE_SECONDS)) as engine:
        engine.request("GET", "/v1/seen")
        return json.loads(engine.getresponse().read())


def test_requests_reach_the_engine_that_has_the_model_and_start_it(server, client):
    for model in ("resnet", "vit", "other"):
        np.testing.assert_array_equal(infer(client, model).as_numpy("y"), X)
    assert infer(client, "resnet", model_version="1").get_response()["model_version"] == "1"
    assert (state(server)["answered"], state(server)["starts"], state(server, "other")["answered"]) == (3, 1, 1)
    with pytest.raises(InferenceServerException, match="unknown model"):  # in the engine's words
        infer(client, "vision")


def test_what_models_are_is_told_as_the_engine_said_and_it_is_not_asked_again(server, client):
    for ask in (client.get_model_metadata, client.get_model_config):
        with pytest.raises(InferenceServerException, match="has not said what model 'vit' is; it is cold, and an infer request starts it"):
            ask("vit")
    assert not client.is_model_ready("vit")
    assert state(server)["state"] == "cold"
    infer(client, "vit")
    eventually(lambda: server.request("/v2/models/vit/versions/2/config")[0] == 200, "it has said all")
    asked = seen_by(server)["lists"]
    assert asked == 2 * 2 * 3  # of two models that it knows, without and with their versions; "vision" it does not know
    metadata = client.get_model_metadata("vit")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    assert metadata["versions"] == ["1", "2"]
    assert client.get_model_metadata("resnet", "1")["platform"] == "tests1"
    assert client.get_model_config("resnet")["max_batch_size"] == 8
    assert client.is_model_ready("vit")
    assert {each["name"]: each["state"] for each in client.get_model_repository_index()} == {
        "vision": "READY", "resnet": "READY", "vit": "READY", "other": "UNAVAILABLE"}
    assert seen_by(server)["lists"] == asked
    assert state(server)["answered"] == 1


def test_what_it_said_stays_when_it_has_ended(server, client):
    infer(client, "other")
    eventually(lambda: server.request("/v2/models/other")[0] == 200, "it has said so")
    pid = state(server, "other")["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: state(server, "other")["state"] == "cold", "its end is seen")
    assert client.get_model_metadata("other")["versions"] == ["1", "2"]
    assert not client.is_model_ready("other")
    assert state(server, "other")["starts"] == 1


def test_what_an_engine_answers_otherwise_is_said_to_be_none_of_it(server, client):
    with pytest.raises(InferenceServerException, match="started by its requests"):
        client.load_model("vit")
    assert server.request("/v2/models/vit/trace/setting")[0] != 200
    assert server.request("/v2/models/none/infer", b"{}")[0] == 404
