"""Triton's own gRPC client against a real server on the host backend, as its manual says; and clients that misbehave."""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2
from patience import PATIENCE_SECONDS, eventually
from security_test import TOKEN, certificate, secured, token_file
from server_models import AFFINE, Affine
from serving import Server, floats
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "docs" / "protocol.md"
X = np.array([[0.5, -1.0, 2.0], [1.0, 2.0, 3.0]], dtype=np.float32)
MIB = 1 << 20


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Slow(torch.nn.Module):
    """Computes for as long as its input says, by work that nothing can shorten."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(1)
        for _ in range(int(x[0])):
            result = result + torch.ones(1000, 100).matmul(torch.ones(100, 1000)).mean()
        return result


def address_of(server: Server) -> str:
    return server.status()["server"]["grpc_endpoint"]


@pytest.fixture
def affine(world) -> Affine:
    return world.models.add("affine", Affine(), **AFFINE)


@pytest.fixture
def server(world, affine) -> Server:
    return world.serve(world.policy("affine", server="model_control: explicit"), "--grpc-port", "0")


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(address_of(server)) as made:
        yield made


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(address_of(server)) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def given(value: np.ndarray, name: str = "x", datatype: str = "FP32") -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value)
    return made


def asked(value: np.ndarray, model: str = "affine", **more: object) -> service_pb2.ModelInferRequest:
    """A request as a message, whose tensor is in raw_input_contents."""
    made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[value.tobytes()], **more)
    made.inputs.add(name="x", datatype="FP32", shape=value.shape)
    return made


def computed(model: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(x)).detach().numpy()


def raw_y(answer: service_pb2.ModelInferResponse) -> np.ndarray:
    return np.frombuffer(answer.raw_output_contents[0], dtype=np.float32).reshape(answer.outputs[0].shape)


def refused(call, code: str, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words) as failure:
        call()
    assert failure.value.status() == f"StatusCode.{code}"


# ---- every call of the client's

def test_it_infers(client, affine):
    answer = client.infer("affine", [given(X)], outputs=[triton.InferRequestedOutput("y")], request_id="seven", timeout=10_000_000)
    np.testing.assert_allclose(answer.as_numpy("y"), computed(affine, X), rtol=1e-6)
    said = answer.get_response()
    assert (said.id, said.model_name, said.model_version, list(said.outputs[0].shape)) == ("seven", "affine", "1", [2, 2])


def test_it_infers_with_nothing_but_its_defaults(client, affine):
    np.testing.assert_allclose(client.infer("affine", [given(X)]).as_numpy("y"), computed(affine, X), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_it_compresses(client, affine, algorithm):
    x = np.arange(3 * 50_000, dtype=np.float32).reshape(50_000, 3)
    answer = client.infer("affine", [given(x)], compression_algorithm=algorithm)
    np.testing.assert_allclose(answer.as_numpy("y"), computed(affine, x), rtol=1e-5)


def test_its_large_tensors_come_and_go(client, affine):
    x = np.random.default_rng(0).random((1_000_000, 3), dtype=np.float32)
    np.testing.assert_allclose(client.infer("affine", [given(x)]).as_numpy("y"), computed(affine, x), rtol=1e-5)


def test_it_infers_in_the_background(client, affine):
    answers: queue.Queue = queue.Queue()
    for number in range(4):
        client.async_infer("affine", [given(X * number)], callback=lambda result, error: answers.put((result, error)), request_id=str(number))
    for _ in range(4):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None
        np.testing.assert_allclose(result.as_numpy("y"), computed(affine, X * int(result.get_response().id)), rtol=1e-6)


def test_its_stream_is_answered_in_order(client, affine):
    answers: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number in range(300):
        client.async_stream_infer("affine", [given(X * number)], request_id=str(number))
        if number % 100 == 50:
            client.async_stream_infer("nobody", [given(X)], request_id="wrong")
    for number in range(300):
        result, error = answers.get(timeout=PATIENCE_SECONDS)
        assert error is None
        assert result.get_response().id == str(number)
        np.testing.assert_allclose(result.as_numpy("y"), computed(affine, X * number), rtol=1e-6)
        if number % 100 == 50:
            result, error = answers.get(timeout=PATIENCE_SECONDS)
            assert result is None and "there is no model 'nobody'" in error.message()
    client.stop_stream()
    assert answers.empty()


def test_it_asks_about_the_server_and_its_models(client):
    assert client.is_server_live() and client.is_server_ready()
    metadata = client.get_server_metadata()
    assert metadata.name == "sluice" and "model_configuration" in metadata.extensions
    assert client.is_model_ready("affine") is False
    client.infer("affine", [given(X)])
    assert client.is_model_ready("affine") and client.is_model_ready("affine", "1")
    about = client.get_model_metadata("affine")
    assert [(each.name, each.datatype, list(each.shape)) for each in about.inputs] == [("x", "FP32", [-1, 3])]
    assert list(about.versions) == ["1"] and about.platform == "pytorch_libtorch"
    config = client.get_model_config("affine").config
    assert (config.name, config.input[0].data_type, list(config.output[0].dims)) == ("affine", model_config_pb2.TYPE_FP32, [2])
    index, = client.get_model_repository_index().models
    assert (index.name, index.version, index.state) == ("affine", "1", "READY")
    for stats in (client.get_inference_statistics(), client.get_inference_statistics("affine"),
                  client.get_inference_statistics("affine", "1")):
        only, = stats.model_stats
        assert (only.name, only.inference_count, only.execution_count, only.inference_stats.success.count) == ("affine", 2, 1, 1)
        assert only.inference_stats.success.ns > 0 and only.batch_stats[0].batch_size == 2


def test_both_endpoints_say_the_same(client, server):
    metadata = client.get_model_metadata("affine", as_json=True)
    assert metadata == {**server.request("/v2/models/affine")[1], "inputs": metadata["inputs"], "outputs": metadata["outputs"]}
    for path, call in (("/v2/models/nobody", client.get_model_metadata), ("/v2/models/nobody/config", client.get_model_config),
                       ("/v2/models/nobody/stats", client.get_inference_statistics), ("/v2/models/nobody/ready", client.is_model_ready)):
        _, said = server.request(path)
        refused(lambda call=call: call("nobody"), "NOT_FOUND", re.escape(said["error"]))
    _, said = server.request("/v2/repository/models/nobody/load", b"{}")
    refused(lambda: client.load_model("nobody"), "NOT_FOUND", re.escape(said["error"]))


# Every call of the client's, with arguments: those that are answered, and those that are refused as not supported.
ANSWERED = {
    "is_server_live": (), "is_server_ready": (), "is_model_ready": ("affine",), "get_server_metadata": (),
    "get_model_metadata": ("affine",), "get_model_config": ("affine",), "get_model_repository_index": (),
    "get_inference_statistics": ("affine",), "get_trace_settings": ("affine",), "update_trace_settings": ("affine", {"trace_level": ["OFF"]}),
    "get_log_settings": (), "update_log_settings": ({"log_verbose_level": 0},),
    "infer": ("affine", [given(X)]), "async_infer": ("affine", [given(X)]), "start_stream": (), "async_stream_infer": ("affine", [given(X)]),
    "stop_stream": (), "load_model": ("affine",), "unload_model": ("affine",),
}
REFUSED = {
    "get_system_shared_memory_status": (), "register_system_shared_memory": ("region", "/key", 64), "unregister_system_shared_memory": (),
    "get_cuda_shared_memory_status": (), "register_cuda_shared_memory": ("region", b"aGFuZGxl", 0, 64), "unregister_cuda_shared_memory": (),
}
# They ask the server nothing.
OF_THE_CLIENT_ALONE = {"close", "register_plugin", "unregister_plugin", "plugin"}


def test_every_call_of_its_is_known_here_and_in_the_manual():
    calls = {name for name in dir(triton.InferenceServerClient) if not name.startswith("_")}
    assert calls - OF_THE_CLIENT_ALONE == ANSWERED.keys() | REFUSED.keys()
    manual = PROTOCOL.read_text(encoding="utf-8").split("\n## gRPC\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", manual, re.MULTILINE)
    said = {name: says for names, says in rows for name in re.findall(r"\w+", names)}
    assert all(name in said and "UNIMPLEMENTED" not in said[name] for name in ANSWERED), said
    assert all("UNIMPLEMENTED" in said.get(name, "") for name in REFUSED), said


def test_every_call_of_the_service_is_in_the_manual():
    manual = PROTOCOL.read_text(encoding="utf-8")
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert not [each.name for each in service.methods if f"`{each.name}`" not in manual]


@pytest.mark.parametrize("call", ANSWERED)
def test_it_hears_what_it_asks(client, call):
    answers: queue.Queue = queue.Queue()
    keep = {"callback": lambda result, error: answers.put(error)}
    if call == "is_model_ready":
        client.infer("affine", [given(X)])  # which makes it warm
    if call in ("async_stream_infer", "stop_stream"):
        client.start_stream(**keep)
    assert getattr(client, call)(*ANSWERED[call], **(keep if call in ("async_infer", "start_stream") else {})) is not False
    if call in ("async_infer", "async_stream_infer"):
        assert answers.get(timeout=PATIENCE_SECONDS) is None


@pytest.mark.parametrize("call", REFUSED)
def test_it_hears_what_is_not_supported(client, call):
    refused(lambda: getattr(client, call)(*REFUSED[call]), "UNIMPLEMENTED", "does not offer")


def test_it_sets_the_level_of_the_log(client, server):
    assert client.get_log_settings(as_json=True)["settings"]["log_info"] == {"bool_param": True}
    assert client.update_log_settings({"log_info": False}, as_json=True)["settings"]["log_info"] == {"bool_param": False}
    told = client.update_log_settings({"log_info": True, "log_verbose_level": 1}, as_json=True)["settings"]
    assert told["log_verbose_level"] == {"uint32_param": 1} and "level=debug" in server.log()
    refused(lambda: client.update_log_settings({"log_file": "/tmp/log"}), "UNIMPLEMENTED", "standard error")
    refused(lambda: client.update_log_settings({"log_info": None}), "INVALID_ARGUMENT", "true or false")


def test_it_hears_that_nothing_is_traced(client):
    assert client.get_trace_settings(as_json=True)["settings"]["trace_level"] == {"value": ["OFF"]}
    for model in (None, "affine"):
        refused(lambda model=model: client.update_trace_settings(model, {"trace_level": ["TIMESTAMPS"]}), "UNIMPLEMENTED", "traces no requests")
        assert client.update_trace_settings(model, {"trace_rate": None}, as_json=True)["settings"]["trace_rate"] == {"value": ["1000"]}
    refused(lambda: client.get_trace_settings("nobody"), "NOT_FOUND", "no model 'nobody'")


def test_the_schema_has_the_numbers_of_the_clients(tmp_path):
    compiled = tmp_path / "schema"
    subprocess.run(["protoc", f"--proto_path={ROOT}", "--include_imports", f"--descriptor_set_out={compiled}",
                    ROOT / "runtime/server/grpc/inference.proto"], check=True)
    own: dict[str, descriptor_pb2.DescriptorProto] = {}

    def collect(prefix: str, messages) -> None:
        for each in messages:
            own[f"{prefix}.{each.name}"] = each
            collect(f"{prefix}.{each.name}", each.nested_type)

    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
        collect(f".{file.package}", file.message_type)
    same = {"ModelReadyRequest": "ModelQuestion", "ModelMetadataRequest": "ModelQuestion", "ModelConfigRequest": "ModelQuestion",
            "ModelStatisticsRequest": "ModelQuestion", "RepositoryModelLoadRequest": "RepositoryModelRequest",
            "RepositoryModelUnloadRequest": "RepositoryModelRequest", "TraceSettingRequest": "TraceSettings",
            "TraceSettingResponse": "TraceSettings", "LogSettingsRequest": "LogSettings", "LogSettingsResponse": "LogSettings"}
    compared = set()

    def compare(theirs, name: str) -> None:
        if (theirs.full_name, name) in compared:
            return
        compared.add((theirs.full_name, name))
        for field in own[name].field:
            if theirs.name == "TraceSettingResponse" and field.name == "model_name":
                continue
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.label == 3) == (other.number, other.type, other.is_repeated), (name, field.name)
            if field.type_name and other.message_type is not None:
                compare(other.message_type, field.type_name)

    for name, message in service_pb2.DESCRIPTOR.message_types_by_name.items():
        if f".inference.{same.get(name, name)}" in own:
            compare(message, f".inference.{same.get(name, name)}")
    assert len(compared) > 70


# ---- tensors

@pytest.mark.parametrize("datatype, field, values, numpy_type", [
    ("BOOL", "bool_contents", [True, False], np.bool_), ("INT8", "int_contents", [-128, 127], np.int8),
    ("INT16", "int_contents", [-5, 6], np.int16), ("INT32", "int_contents", [1 << 30, -1], np.int32),
    ("INT64", "int64_contents", [1 << 62, -1], np.int64), ("UINT8", "uint_contents", [0, 255], np.uint8),
    ("FP32", "fp32_contents", [0.5, -2.0], np.float32), ("FP64", "fp64_contents", [0.1, 1e300], np.float64)])
def test_typed_contents_are_what_raw_ones_are(world, datatype, field, values, numpy_type):
    world.models.add("same", Same(), {"x": (f"TYPE_{datatype}", [2])}, {"y": (f"TYPE_{datatype}", [2])})
    server = world.serve(world.policy("same"), "--grpc-port", "0")
    raw = np.array([values], dtype=numpy_type).tobytes()
    with grpc.insecure_channel(address_of(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for is_raw in (True, False):
            request = service_pb2.ModelInferRequest(model_name="same")
            tensor = request.inputs.add(name="x", datatype=datatype, shape=[1, 2])
            if is_raw:
                request.raw_input_contents.append(raw)
            else:
                getattr(tensor.contents, field).extend(values)
            answer = stub.ModelInfer(request, timeout=PATIENCE_SECONDS)
            assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == (datatype, [1, 2])
            assert list(answer.raw_output_contents) == [raw] and not answer.outputs[0].HasField("contents")


def test_bf16_goes_as_it_is(world):
    world.models.add("same", Same(), {"x": ("TYPE_BF16", [2])}, {"y": ("TYPE_BF16", [2])})
    server = world.serve(world.policy("same"), "--grpc-port", "0")
    request = service_pb2.ModelInferRequest(model_name="same", raw_input_contents=[b"\xc0\x3f\x00\xc0"])
    request.inputs.add(name="x", datatype="BF16", shape=[1, 2])
    with grpc.insecure_channel(address_of(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, timeout=PATIENCE_SECONDS)
        assert answer.outputs[0].datatype == "BF16" and list(answer.raw_output_contents) == list(request.raw_input_contents)
        request.ClearField("raw_input_contents")
        request.inputs[0].contents.fp32_contents.extend([1.5, -2.0])
        with pytest.raises(grpc.RpcError, match="cannot have elements of BF16; send them in raw_input_contents"):
            stub.ModelInfer(request, timeout=PATIENCE_SECONDS)


def changed(change) -> service_pb2.ModelInferRequest:
    made = asked(X)
    change(made)
    return made


@pytest.mark.parametrize("request_, code, words", [
    (changed(lambda r: r.ClearField("inputs")), "INVALID_ARGUMENT", "input 'x' is missing"),
    (changed(lambda r: r.inputs[0].shape.__setitem__(1, 4)), "INVALID_ARGUMENT", r"the model takes \[-1,3\]: dimension 1 must be 3, not 4"),
    (changed(lambda r: r.inputs[0].shape.__setitem__(0, -2)), "INVALID_ARGUMENT", "a dimension is an integer of at least 0"),
    (changed(lambda r: r.inputs[0].shape.append(1)), "INVALID_ARGUMENT", "with 3 dimensions; the model takes 2"),
    (changed(lambda r: r.inputs[0].shape.__setitem__(0, 3)), "INVALID_ARGUMENT", "size of 24 bytes and shape .3,3.: 9 elements of FP32 take 36"),
    (changed(lambda r: setattr(r.inputs[0], "datatype", "INT32")), "INVALID_ARGUMENT", "has datatype INT32; the model takes FP32"),
    (changed(lambda r: setattr(r.inputs[0], "datatype", "FP31")), "INVALID_ARGUMENT", "unknown datatype 'FP31'"),
    (changed(lambda r: setattr(r.inputs[0], "name", "z")), "INVALID_ARGUMENT", "has no input 'z'"),
    (changed(lambda r: r.raw_input_contents.append(b"")), "INVALID_ARGUMENT", "raw_input_contents has 2 for 1 inputs"),
    (changed(lambda r: r.ClearField("raw_input_contents")), "INVALID_ARGUMENT", "size of 0 bytes"),
    (changed(lambda r: r.inputs[0].contents.fp32_contents.append(1)), "INVALID_ARGUMENT", "give one of them"),
    (changed(lambda r: r.outputs.add(name="z")), "INVALID_ARGUMENT", "has no output 'z'"),
    (changed(lambda r: r.outputs.add(name="y").parameters["classification"].__setattr__("int64_param", 1)), "UNIMPLEMENTED", "classification"),
    (changed(lambda r: r.inputs[0].parameters["shared_memory_region"].__setattr__("string_param", "a")), "UNIMPLEMENTED", "shared_memory_region"),
    (changed(lambda r: r.parameters["timeout"].__setattr__("int64_param", -1)), "INVALID_ARGUMENT", "number of microseconds"),
    (changed(lambda r: r.parameters["priority"].__setattr__("string_param", "high")), "INVALID_ARGUMENT", "'priority' is \"high\""),
    (changed(lambda r: setattr(r, "model_name", "nobody")), "NOT_FOUND", "there is no model 'nobody'"),
    (changed(lambda r: setattr(r, "model_version", "7")), "NOT_FOUND", "has no version '7'"),
    (changed(lambda r: setattr(r, "model_name", "")), "NOT_FOUND", "there is no model ''"),
])
def test_wrong_requests_are_refused_with_what_would_be_right(server, stub, request_, code, words):
    with pytest.raises(grpc.RpcError) as alone:
        stub.ModelInfer(request_, timeout=PATIENCE_SECONDS)
    assert alone.value.code().name == code and re.search(words, alone.value.details()), alone.value.details()
    inside, after = stub.ModelStreamInfer(iter([request_, asked(X, id="after")]), timeout=PATIENCE_SECONDS)
    assert inside.error_message == alone.value.details()
    assert after.infer_response.id == "after" and not after.error_message


def test_what_is_no_message_is_refused(server):
    with grpc.insecure_channel(address_of(server)) as channel:
        for name, code in (("ModelInfer", "INVALID_ARGUMENT"), ("ModelMetadata", "INVALID_ARGUMENT"), ("Nothing", "UNIMPLEMENTED")):
            with pytest.raises(grpc.RpcError) as failure:
                channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(b"\xff\xff\xff", timeout=PATIENCE_SECONDS)
            assert failure.value.code().name == code
        with pytest.raises(grpc.RpcError) as nothing:
            channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")(iter(()), timeout=PATIENCE_SECONDS)
        assert nothing.value.code().name == "INVALID_ARGUMENT"
    assert server.status()["server"]["state"] == "ready"


def test_messages_have_the_limit_of_bodies_compressed_or_not(world, affine):
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("server: {", "server: {max_body: 1MiB, grpc_port: 0, "))
    server = world.serve(policy)
    x = np.zeros((MIB, 3), dtype=np.float32)
    with triton.InferenceServerClient(address_of(server)) as client:
        for algorithm in (None, "gzip", "deflate"):
            refused(lambda algorithm=algorithm: client.infer("affine", [given(x)], compression_algorithm=algorithm), "RESOURCE_EXHAUSTED",
                    "larger than")
        assert client.infer("affine", [given(X)]).as_numpy("y").shape == (2, 2)


# ---- who may ask

def test_a_client_needs_the_token(world, tmp_path):
    token_file(tmp_path)
    server = world.serve(secured(world, "grpc_port: 0, token_file: tokens"))
    address = world.status()["server"]["grpc_endpoint"]
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready()
        refused(lambda: client.infer("affine", [given(X)]), "UNAUTHENTICATED", "asks for a token")
        refused(lambda: client.get_server_metadata(headers={"authorization": "Bearer no"}), "UNAUTHENTICATED", "does not know that token")
        answer = client.infer("affine", [given(X)], headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.as_numpy("y").shape == (2, 2)
        client.start_stream(callback=lambda result, error: None, headers={"authorization": f"Bearer {TOKEN}"})
        client.stop_stream()
    assert TOKEN not in server.log()


def test_it_speaks_tls_with_a_certificate_that_may_change(world, tmp_path):
    own, key = certificate(tmp_path)
    world.serve(secured(world, "grpc_port: 0, tls: {certificate_file: own.pem, key_file: own.key}"))
    port = world.status()["server"]["grpc_endpoint"].rsplit(":", 1)[1]
    first = own.read_bytes()

    def is_answered(trusted: bytes) -> bool:
        credentials = grpc.ssl_channel_credentials(trusted)
        with grpc.secure_channel(f"localhost:{port}", credentials, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                return service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(service_pb2.ServerLiveRequest(), timeout=PATIENCE_SECONDS).live
            except grpc.RpcError:
                return False

    assert is_answered(first)
    with triton.InferenceServerClient(f"localhost:{port}", ssl=True, root_certificates=str(own)) as client:
        assert client.infer("affine", [given(X)]).as_numpy("y").shape == (2, 2)
    with grpc.insecure_channel(f"localhost:{port}") as channel, pytest.raises(grpc.RpcError):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(service_pb2.ServerLiveRequest(), timeout=PATIENCE_SECONDS)
    new, new_key = certificate(tmp_path, "new")
    os.replace(new_key, key)
    os.replace(new, own)
    eventually(lambda: is_answered(own.read_bytes()), "the new certificate is shown")
    assert not is_answered(first)


def test_a_port_that_is_taken_ends_the_start(world, server):
    policy = world.policy("affine")
    port = address_of(server).rsplit(":", 1)[1]
    code, log = world.refused(policy, "--grpc-port", port)
    assert code == 4 and f"cannot listen on 127.0.0.1:{port}: the port is taken" in log


def test_the_check_of_a_policy_passes_where_there_is_grpc(world, affine, sluice):
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("server: {", "server: {grpc_port: 0, "))
    done = subprocess.run([sluice, "policy", "check", policy], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_without_the_key_there_is_none(world, affine):
    server = world.serve(world.policy("affine"))
    assert address_of(server) == ""


# ---- clients that leave, and servers that end

@pytest.fixture
def slow(world) -> Server:
    world.models.add("slow", Slow(), {"x": ("TYPE_FP32", [1])}, {"y": ("TYPE_FP32", [1])}, max_batch_size=0)
    return world.serve(world.policy("slow", server="request_timeout: 10m"), "--grpc-port", "0")


LONG, SHORT = np.array([1000], dtype=np.float32), np.array([1], dtype=np.float32)
#: Two of them end well within a server's grace of 10 s, also on a busy machine.
DUE = np.array([30], dtype=np.float32)


def in_flight(server: Server) -> int:
    return server.status()["requests"]["in_flight"]


def test_a_cancelled_request_is_not_computed(slow):
    with grpc.insecure_channel(address_of(slow)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(asked(SHORT, "slow"), timeout=PATIENCE_SECONDS)
        first = stub.ModelInfer.future(asked(LONG, "slow"))
        eventually(lambda: in_flight(slow) == 1, "the first is computed")
        waiting = [stub.ModelInfer.future(asked(LONG, "slow")) for _ in range(10)]
        eventually(lambda: in_flight(slow) == 11, "the others wait")
        for each in waiting:
            each.cancel()
        eventually(lambda: in_flight(slow) <= 1, "the others are gone")
        first.result(timeout=PATIENCE_SECONDS)
    assert slow.request("/v2/models/slow/stats")[1]["model_stats"][0]["inference_stats"]["success"]["count"] == 2


def test_a_deadline_limits_the_request(slow):
    with triton.InferenceServerClient(address_of(slow)) as client:
        client.infer("slow", [given(SHORT)])
        refused(lambda: client.infer("slow", [given(np.array([1e7], dtype=np.float32))], client_timeout=0.5), "DEADLINE_EXCEEDED", "(?i)deadline|time is over")
        refused(lambda: client.infer("slow", [given(np.array([1e7], dtype=np.float32))], timeout=500_000), "DEADLINE_EXCEEDED", "(?i)deadline|time is over")


CHILD = """
import sys, numpy, tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1])
x = triton.InferInput("x", [1], "FP32")
x.set_data_from_numpy(numpy.array([1000], dtype=numpy.float32))
client.start_stream(callback=lambda result, error: None)
for _ in range(20):
    client.async_stream_infer("slow", [x])
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_client_killed_amid_its_stream_leaves_nothing_behind(slow):
    child = subprocess.Popen([sys.executable, "-c", CHILD, address_of(slow)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "sent\n"
        eventually(lambda: in_flight(slow) >= 10, "its requests wait")
    finally:
        child.kill()
        child.wait()
    eventually(lambda: in_flight(slow) <= 1, "its requests are gone")
    with triton.InferenceServerClient(address_of(slow)) as client:
        assert client.infer("slow", [given(SHORT)]).as_numpy("y").shape == (1,)


def test_many_streams_are_answered_beside_each_other(world, affine):
    count, requests = 40, 25
    server = world.serve(world.policy("affine", more=f", max_queue: {count * requests}"), "--grpc-port", "0")
    with grpc.insecure_channel(address_of(server)) as channel, ThreadPoolExecutor(count) as streams:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def run(number: int) -> list:
            sent = (asked(X * number, id=str(each)) for each in range(requests))
            answers = list(stub.ModelStreamInfer(sent, timeout=PATIENCE_SECONDS))
            assert [each.error_message for each in answers] == [""] * requests
            return [(each.infer_response.id, raw_y(each.infer_response)) for each in answers]

        for number, seen in enumerate(streams.map(run, range(count))):
            assert [each for each, _ in seen] == [str(each) for each in range(requests)]
            for _, y in seen:
                np.testing.assert_allclose(y, computed(affine, X * number), rtol=1e-5)


def test_sigterm_answers_what_is_due_and_ends_streams(slow):
    with grpc.insecure_channel(address_of(slow)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(asked(SHORT, "slow"), timeout=PATIENCE_SECONDS)
        more: queue.Queue = queue.Queue()
        idle = stub.ModelStreamInfer(iter(more.get, None))
        executor = slow.executor()
        os.kill(executor, signal.SIGSTOP)  # until both are there
        due = stub.ModelStreamInfer(itertools.chain([asked(DUE, "slow", id="due")], iter(more.get, None)))
        alone = stub.ModelInfer.future(asked(DUE, "slow"))
        eventually(lambda: in_flight(slow) == 2, "two are in flight")
        slow.process.send_signal(signal.SIGTERM)
        os.kill(executor, signal.SIGCONT)
        assert next(due).infer_response.id == "due"
        assert len(alone.result(timeout=PATIENCE_SECONDS).outputs) == 1
        for stream in (due, idle):
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            assert ended.value.code().name == "UNAVAILABLE" and "shutting down" in ended.value.details()
        more.put(None)
        more.put(None)
    assert slow.process.wait(PATIENCE_SECONDS) == 0


# ---- what the operator sees

def test_each_request_has_a_line_in_the_access_log(world, affine, tmp_path):
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("server: {", "server: {access_log: accesses, grpc_port: 0, "))
    server = world.serve(policy)
    with grpc.insecure_channel(address_of(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(asked(X, id="alone"), timeout=PATIENCE_SECONDS)
        list(stub.ModelStreamInfer(iter([asked(X, id="first"), asked(X, "nobody", id="wrong")]), timeout=PATIENCE_SECONDS))
    log = policy.parent / "accesses"

    def lines() -> list[str]:
        return [each for each in log.read_text().splitlines() if "GRPCInferenceService/" in each]

    eventually(lambda: len(lines()) == 3, "a line for each")
    for line, name, status, identity in zip(lines(), ("ModelInfer", "ModelStreamInfer", "ModelStreamInfer"), (200, 200, 404), ("alone", "first", "wrong"),
                                            strict=True):
        assert f'path="/inference.GRPCInferenceService/{name}" ' in line and f"status={status} " in line and f'id="{identity}"' in line, line
        assert "peer=127.0.0.1:" in line
    assert "cause=not_found" in lines()[2]


def test_requests_count_whichever_way_they_come(client, server):
    client.infer("affine", [given(X)])
    assert server.infer("affine", [floats("x", torch.from_numpy(X))])[0] == 200
    assert server.status()["requests"]["total"] == 2


def test_sluice_status_shows_its_address(server, sluice):
    shown = subprocess.run([sluice, "status"], capture_output=True, text=True, check=True).stdout
    assert f"{server.url}, gRPC on {address_of(server)}, ready" in shown
