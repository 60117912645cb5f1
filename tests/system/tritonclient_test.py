"""Triton's own Python client against a real server on the host backend, as its manual says: whatever it sends by default."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from server_models import AFFINE, Affine
from serving import Server
from tritonclient.utils import InferenceServerException

X = np.array([[0.5, -1.0, 2.0], [1.0, 2.0, 3.0]], dtype=np.float32)


class Minus(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


@pytest.fixture
def affine(world) -> Affine:
    return world.models.add("affine", Affine(), **AFFINE)


@pytest.fixture
def server(world, affine) -> Server:
    return world.serve(world.policy("affine"))


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


@pytest.mark.parametrize("call", ["load_model", "unload_model"])
def test_it_hears_what_is_not_supported(client, call):
    with pytest.raises(InferenceServerException) as refused:
        getattr(client, call)("affine")
    assert refused.value.status() == "501"


@pytest.mark.parametrize("names", [("INPUT__1", "INPUT__0"), ("b", "a")])
def test_inputs_fill_the_arguments_that_their_names_say(world, names):
    world.models.add("minus", Minus(), {name: ("TYPE_FP32", [2]) for name in names}, {"OUTPUT__0": ("TYPE_FP32", [2])})
    server = world.serve(world.policy("minus"))
    a, b = np.array([[10, 20]], dtype=np.float32), np.array([[1, 2]], dtype=np.float32)
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        answer = client.infer("minus", [given(b, names[0]), given(a, names[1])])
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT__0"), [[9, 18]])
