"""Triton's own Python client against a real server on the host backend, as its manual says: whatever it sends by default."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from server_models import AFFINE, Affine
from serving import Server
from tritonclient.utils import InferenceServerException

PROTOCOL = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
X = np.array([[0.5, -1.0, 2.0], [1.0, 2.0, 3.0]], dtype=np.float32)


class Minus(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


@pytest.fixture
def affine(world) -> Affine:
    return world.models.add("affine", Affine(), **AFFINE)


@pytest.fixture
def server(world, affine) -> Server:
    return world.serve(world.policy("affine", server="model_control: explicit"))


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as made:
        yield made


def given(value: np.ndarray, name: str = "x", datatype: str = "FP32", **how: object) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value, **how)
    return made


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_it_infers(client, affine, binary_in, binary_out):
    wanted = affine(torch.from_numpy(X)).detach().numpy()
    output = triton.InferRequestedOutput("y", binary_data=binary_out)
    answer = client.infer("affine", [given(X, binary_data=binary_in)], outputs=[output], request_id="seven", timeout=10_000_000)
    np.testing.assert_allclose(answer.as_numpy("y"), wanted, rtol=1e-6)
    assert answer.get_response()["id"] == "seven"
    assert answer.get_output("y")["shape"] == [2, 2]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_it_compresses(client, affine, algorithm, binary):
    x = np.arange(3 * 500, dtype=np.float32).reshape(500, 3)
    answer = client.infer("affine", [given(x, binary_data=binary)], outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
                          request_compression_algorithm=algorithm, response_compression_algorithm=algorithm)
    np.testing.assert_allclose(answer.as_numpy("y"), affine(torch.from_numpy(x)).detach().numpy(), rtol=1e-5)


def test_it_infers_with_nothing_but_its_defaults(client, affine):
    answer = client.infer("affine", [given(X)])
    np.testing.assert_allclose(answer.as_numpy("y"), affine(torch.from_numpy(X)).detach().numpy(), rtol=1e-6)


def test_it_infers_in_the_background(client, affine):
    waiting = [client.async_infer("affine", [given(X * number)]) for number in range(4)]
    for number, each in enumerate(waiting):
        wanted = affine(torch.from_numpy(X * number)).detach().numpy()
        np.testing.assert_allclose(each.get_result().as_numpy("y"), wanted, rtol=1e-6)


def test_it_asks_about_the_server_and_its_models(client):
    assert client.is_server_live() and client.is_server_ready()
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    client.infer("affine", [given(X)])
    assert client.is_model_ready("affine") and client.is_model_ready("affine", "1")
    metadata = client.get_model_metadata("affine")
    assert [each["name"] for each in metadata["inputs"]] == ["x"] and metadata["versions"] == ["1"]
    assert client.get_model_config("affine")["name"] == "affine"
    assert [each["name"] for each in client.get_model_repository_index()] == ["affine"]
    for stats in (client.get_inference_statistics(), client.get_inference_statistics("affine"),
                  client.get_inference_statistics("affine", "1")):
        only, = stats["model_stats"]
        assert (only["name"], only["inference_count"], only["execution_count"]) == ("affine", 2, 1)


def test_it_hears_what_was_wrong(client):
    with pytest.raises(InferenceServerException, match="no model 'nobody'") as unknown:
        client.infer("nobody", [given(X)])
    assert unknown.value.status() == "404"
    with pytest.raises(InferenceServerException, match="'z'") as misnamed:
        client.infer("affine", [given(X, "z")])
    assert misnamed.value.status() == "400"


# Every call of the client's, with arguments: those that are answered, and those that are refused as not supported.
ANSWERED = {
    "is_server_live": (), "is_server_ready": (), "is_model_ready": ("affine",), "get_server_metadata": (),
    "get_model_metadata": ("affine",), "get_model_config": ("affine",), "get_model_repository_index": (),
    "get_inference_statistics": ("affine",), "get_trace_settings": ("affine",), "update_trace_settings": ("affine", {"trace_level": ["OFF"]}),
    "load_model": ("affine",), "unload_model": ("affine",), "get_log_settings": (), "update_log_settings": ({"log_verbose_level": 0},),
    "infer": ("affine", [triton.InferInput("x", [1, 3], "FP32").set_data_from_numpy(X[:1])]),
    "async_infer": ("affine", [triton.InferInput("x", [1, 3], "FP32").set_data_from_numpy(X[:1])]),
}
REFUSED = {
    "get_system_shared_memory_status": (), "register_system_shared_memory": ("region", "/key", 64), "unregister_system_shared_memory": (),
    "get_cuda_shared_memory_status": (), "register_cuda_shared_memory": ("region", b"handle", 0, 64), "unregister_cuda_shared_memory": (),
}
# They ask the server nothing.
OF_THE_CLIENT_ALONE = {"close", "generate_request_body", "parse_response_body", "register_plugin", "unregister_plugin", "plugin"}


def test_every_call_of_its_is_known_here_and_in_the_manual():
    calls = {name for name in dir(triton.InferenceServerClient) if not name.startswith("_")}
    assert calls - OF_THE_CLIENT_ALONE == ANSWERED.keys() | REFUSED.keys()
    manual = PROTOCOL.read_text(encoding="utf-8").split("\n## Triton's client\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", manual, re.MULTILINE)
    said = {name: says for names, says in rows for name in re.findall(r"\w+", names)}
    assert all(name in said and "501" not in said[name] for name in ANSWERED), said
    assert all("501" in said.get(name, "") for name in REFUSED), said


@pytest.mark.parametrize("call", ANSWERED)
def test_it_hears_what_it_asks(client, call):
    if call == "is_model_ready":
        client.infer("affine", [given(X)])  # which makes it warm
    answer = getattr(client, call)(*ANSWERED[call])
    assert answer is not False
    if call == "async_infer":
        answer.get_result()


@pytest.mark.parametrize("call", REFUSED)
def test_it_hears_what_is_not_supported(client, call):
    with pytest.raises(InferenceServerException) as refused:
        getattr(client, call)(*REFUSED[call])
    assert refused.value.status() == "501"


def test_it_sets_the_level_of_the_log(client, server):
    assert client.get_log_settings()["log_info"] is True
    assert client.update_log_settings({"log_info": False})["log_info"] is False
    settings = client.get_log_settings()
    assert (settings["log_info"], settings["log_warning"], settings["log_verbose_level"]) == (False, True, 0)
    assert client.update_log_settings({"log_info": True, "log_verbose_level": 1})["log_verbose_level"] == 1
    assert "level=debug" in server.log()
    with pytest.raises(InferenceServerException, match="standard error") as refused:
        client.update_log_settings({"log_file": "/tmp/log"})
    assert refused.value.status() == "501"


def test_it_hears_that_nothing_is_traced(client):
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    for model in (None, "affine"):
        with pytest.raises(InferenceServerException, match="traces no requests") as refused:
            client.update_trace_settings(model, {"trace_level": ["TIMESTAMPS"]})
        assert refused.value.status() == "501"
    with pytest.raises(InferenceServerException) as unknown:
        client.get_trace_settings("nobody")
    assert unknown.value.status() == "404"


def test_its_priority_is_taken(client, affine):
    answer = client.infer("affine", [given(X)], priority=3)
    np.testing.assert_allclose(answer.as_numpy("y"), affine(torch.from_numpy(X)).detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize("names", [("INPUT__1", "INPUT__0"), ("b", "a")])
def test_inputs_fill_the_arguments_that_their_names_say(world, names):
    world.models.add("minus", Minus(), {name: ("TYPE_FP32", [2]) for name in names}, {"OUTPUT__0": ("TYPE_FP32", [2])})
    server = world.serve(world.policy("minus"))
    a, b = np.array([[10, 20]], dtype=np.float32), np.array([[1, 2]], dtype=np.float32)
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        answer = client.infer("minus", [given(b, names[0]), given(a, names[1])])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT__0"), [[9, 18]])
