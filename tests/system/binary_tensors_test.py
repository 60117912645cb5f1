"""Tensors behind the JSON of requests and answers, against a real server on the host backend."""

from __future__ import annotations

import http.client
import json

import numpy as np
import pytest
import torch
from patience import PATIENCE_SECONDS
from server_models import AFFINE, Affine
from serving import Server, floats

TYPES = {"BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
         "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16,
         "BF16": np.uint16, "FP32": np.float32, "FP64": np.float64}


class Echo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class InPlace(torch.nn.Module):
    """Computes in its input's own memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


def post(server: Server, model: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def post_binary(server: Server, model: str, request: dict, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    text = json.dumps(request).encode()
    return post(server, model, text + raw, {"Inference-Header-Content-Length": str(len(text))})


def described(name: str, datatype: str, shape: list[int], size: int) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def outputs_of(headers: dict[str, str], body: bytes) -> dict[str, bytes | list]:
    """By name: the bytes of those that are binary, the list of those in JSON."""
    end = int(headers["Inference-Header-Content-Length"])
    assert headers["Content-Type"] == "application/octet-stream"
    found: dict[str, bytes | list] = {}
    for output in json.loads(body[:end])["outputs"]:
        if "data" in output:
            found[output["name"]] = output["data"]
            continue
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = body[end:end + size]
        end += size
    assert end == len(body)
    return found


def add_echo(world, name: str, datatype: str) -> None:
    spec = {"x": (f"TYPE_{datatype}", [-1])}
    world.models.add(name, Echo(), spec, {"y": spec["x"]}, batched=False)


def test_each_datatype_comes_back_bit_by_bit_whatever_its_size(world):
    for datatype in TYPES:
        add_echo(world, datatype.lower(), datatype)
    server = world.serve(world.policy(*(each.lower() for each in TYPES)))
    random = np.random.default_rng(5)
    for datatype, numpy_type in TYPES.items():
        width = np.dtype(numpy_type).itemsize
        # every pattern of bits is one, also those of NaNs with something in them; the larger ones travel in a file
        for count in (0, 1, 1000, 100_001):
            raw = random.bytes(count * width)
            if datatype == "BOOL":
                raw = bytes(each & 1 for each in raw)
            request = {"inputs": [described("x", datatype, [count], len(raw))],
                       "parameters": {"binary_data_output": True}}
            status, headers, body = post_binary(server, datatype.lower(), request, raw)
            assert status == 200, body
            assert outputs_of(headers, body)["y"] == raw, (datatype, count)


def test_binary_and_json_mix_and_mean_the_same(world):
    affine = world.models.add("affine", Affine(), **AFFINE)
    server = world.serve(world.policy("affine"))
    x = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
    expected = affine(x).detach().numpy()
    binary = {"inputs": [described("x", "FP32", [2, 3], 24)]}
    as_binary = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    for request, raw in (({**binary, **as_binary}, x.numpy().tobytes()), ({"inputs": [floats("x", x)], **as_binary}, b"")):
        status, headers, body = post_binary(server, "affine", request, raw)
        assert status == 200, body
        seen = np.frombuffer(outputs_of(headers, body)["y"], np.float32).reshape(2, 2)
        np.testing.assert_allclose(seen, expected, rtol=1e-6)
    status, headers, body = post_binary(server, "affine", binary, x.numpy().tobytes())
    assert (status, headers["Content-Type"]) == (200, "application/json")
    np.testing.assert_allclose(np.reshape(json.loads(body)["outputs"][0]["data"], (2, 2)), expected, rtol=1e-6)
    assert server.request("/v2")[1]["extensions"] == ["model_configuration", "statistics", "binary_tensor_data", "logging",
                                               "model_repository"]


def test_a_model_may_compute_in_its_input(world):
    spec = {"x": ("TYPE_FP32", [-1])}
    world.models.add("in_place", InPlace(), spec, {"y": spec["x"]}, batched=False)
    server = world.serve(world.policy("in_place"))
    x = np.arange(50_000, dtype=np.float32)
    request = {"inputs": [described("x", "FP32", [len(x)], x.nbytes)], "parameters": {"binary_data_output": True}}
    for _ in range(2):
        status, headers, body = post_binary(server, "in_place", request, x.tobytes())
        assert status == 200, body
        assert np.array_equal(np.frombuffer(outputs_of(headers, body)["y"], np.float32), x + 1)


X = described("x", "FP32", [1, 3], 12)


@pytest.mark.parametrize(("request_of", "raw", "length", "words"), [
    ({"inputs": [X]}, bytes(12), 1, ["first 1 bytes", "JSON"]),
    ({"inputs": [X]}, bytes(12), 9999, ["9999", "the body has"]),
    ({"inputs": [X]}, bytes(12), "-1", ["-1", "number of bytes"]),
    ({"inputs": [X]}, bytes(11), None, ["size of 12", "11 of the 11"]),
    ({"inputs": [X]}, bytes(13), None, ["13 bytes behind", "must be 13"]),
    ({"inputs": [described("x", "FP32", [2, 3], 12)]}, bytes(12), None, ["[2,3]", "6 elements of FP32 take 24"]),
    ({"inputs": [described("x", "FP32", [1, 3], -12)]}, bytes(12), None, ["-12", "number of bytes"]),
    ({"inputs": [{**X, "data": [1, 2, 3]}]}, bytes(12), None, ["both"]),
])
def test_what_does_not_fit_is_told_and_harms_nobody(world, request_of, raw, length, words):
    affine = world.models.add("affine", Affine(), **AFFINE)
    server = world.serve(world.policy("affine"))
    text = json.dumps(request_of).encode()
    status, _, body = post(server, "affine", text + raw,
                           {"Inference-Header-Content-Length": str(len(text) if length is None else length)})
    assert status == 400, body
    for word in words:
        assert word in json.loads(body)["error"]
    x = torch.ones(1, 3)
    torch.testing.assert_close(server.outputs("affine", [floats("x", x)])[0], affine(x))


def test_a_length_of_the_json_that_is_said_twice_is_refused(world):
    world.models.add("affine", Affine(), **AFFINE)
    server = world.serve(world.policy("affine"))
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    connection.putrequest("POST", "/v2/models/affine/infer")
    for length in ("2", "1"):
        connection.putheader("Inference-Header-Content-Length", length)
    connection.putheader("Content-Length", "2")
    connection.endheaders(b"{}")
    answer = connection.getresponse()
    assert answer.status == 400 and "several times" in answer.read().decode()
    connection.close()
