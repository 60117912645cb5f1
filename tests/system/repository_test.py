"""A model repository as users bring it from Triton, with what cannot be served in it."""

from __future__ import annotations

import json
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from launching import call
from server_models import AFFINE, Affine
from serving import World, floats

X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])

ONNX = 'platform: "onnxruntime_onnx"\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }\noutput { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
ENSEMBLE = 'platform: "ensemble"\nensemble_scheduling { step [ ] }\n'


class Difference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - b


class Numbers(torch.nn.Module):
    """Returns integers, whatever it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int64)


@pytest.fixture
def affine(world):
    return world.models.add("affine", Affine(), **AFFINE)


def index_of(server) -> dict[str, dict]:
    status, answer = server.request("/v2/repository/index", b"{}")
    assert status == 200
    return {each["name"]: each for each in answer}


def spoil(world: World) -> dict[str, str]:
    """Folders that cannot be served, with a word of the reason for each."""
    root = world.models.root
    (root / "lost+found").mkdir(parents=True)
    (root / "empty" / "1").mkdir(parents=True)
    for name, config in (("onnx", ONNX), ("ensemble", ENSEMBLE), ("broken", "platform: \"pytorch_libtorch\"\ninput {")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.pt").write_bytes(b"model")
        (root / name / "config.pbtxt").write_text(config)
    return {"lost+found": "config.pbtxt", "empty": "config.pbtxt", "onnx": "onnxruntime_onnx", "ensemble": "ensemble",
            "broken": "config.pbtxt:2:8"}


def test_what_cannot_be_served_is_listed_with_its_reason_and_harms_nobody(world, affine):
    faults = spoil(world)
    server = world.serve(world.policy("affine"))
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))
    assert server.request("/v2/health/ready") == (200, {"ready": True})
    index = index_of(server)
    assert index.keys() == {"affine", *faults}
    assert (index["affine"]["state"], index["affine"]["version"]) == ("READY", "1")
    for name, word in faults.items():
        assert index[name]["state"] == "UNAVAILABLE"
        assert word in index[name]["reason"]
        assert server.log().count(f'cannot be served model="{name}" ') == 1
        status, answer = server.infer(name, [floats("x", X)])
        assert status == 503
        assert word in answer["error"]
    assert {each["name"] for each in server.status()["unservable"]} == faults.keys()


def test_models_of_the_policy_that_cannot_be_served_leave_the_others_and_health_says_so(world, affine, sluice):
    spoil(world)
    world.models.add("truncated", Affine(), **AFFINE)
    (world.models.root / "truncated" / "1" / "model.pt").write_bytes(b"this is no model")
    policy = world.policy("onnx", "affine", "truncated")
    server = world.serve(policy)
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))
    status, answer = server.request("/v2/health/ready")
    assert status == 503
    assert "model 'onnx' cannot be served: " in answer["error"]
    assert "model 'truncated' cannot be served: " in answer["error"]
    index = index_of(server)
    assert index["truncated"]["state"] == "UNAVAILABLE"
    assert "model.pt" in index["truncated"]["reason"]
    status, answer = server.infer("truncated", [floats("x", X)])
    assert status == 503, answer
    assert answer["error"] == f"model 'truncated' cannot be served: {index['truncated']['reason']}"
    assert index["truncated"]["reason"].startswith(str(world.models.root / "truncated" / "1" / "model.pt"))
    for name in ("truncated", "onnx"):
        reason = {"error": f"model '{name}' cannot be served: {index[name]['reason']}"}
        for path in ("", "/versions/1", "/config"):
            assert server.request(f"/v2/models/{name}{path}") == (503, reason)
        for wrong in ([floats("x", X[0])], [floats("z", X)], []):
            assert server.infer(name, wrong) == (503, reason)
    assert server.request("/v2/models/absent/config")[0] == 404
    assert server.request("/v2/models/affine/config")[0] == 200
    assert server.model("truncated")["state"] == "failed"
    assert server.log().count("cannot be served model=truncated ") == 1
    shown = call(sluice, "status").stdout
    assert "truncated cannot be served: " in shown
    assert "  onnx: " in shown

    checked = call(sluice, "policy", "check", policy)
    assert checked.returncode == 1
    assert not checked.stdout
    assert "model 'onnx' cannot be served: " in checked.stderr
    assert server.end() == 0


def test_all_models_that_cannot_be_served_are_named_where_none_can(world):
    spoil(world)
    code, message = world.refused(world.policy("onnx", "broken"))
    assert code == 8, message
    for word in ("onnx", "broken/config.pbtxt:2:8"):
        assert word in message


def test_who_has_found_what_makes_no_difference_where_no_model_can_be_served(world):
    """Some by their configuration, some by their file."""
    spoil(world)
    for name in ("truncated", "garbage"):
        world.models.add(name, Affine(), **AFFINE)
        (world.models.root / name / "1" / "model.pt").write_bytes(b"this is no model")
    code, message = world.refused(world.policy("onnx", "truncated", "broken", "garbage"))
    assert code == 2, message
    last = message.splitlines()[-1]
    for name in ("onnx", "truncated", "broken", "garbage"):
        assert last.count(f"model '{name}': ") == 1


def test_a_check_of_the_policy_names_every_fault_of_the_repository(world, affine, sluice):
    spoil(world)
    done = call(sluice, "policy", "check", world.policy("affine", "onnx", "absent", "empty"))
    assert done.returncode == 1
    faults = done.stderr.splitlines()
    assert len(faults) == 3
    for line, word in zip(faults, ("'onnx' cannot be served: ", "'absent' is not in", "'empty' cannot be served: "), strict=True):
        assert word in line
    assert call(sluice, "policy", "check", world.policy("affine")).returncode == 0


def test_a_model_that_spoils_while_the_server_runs_harms_nobody_when_the_executor_is_replaced(world, affine):
    world.models.add("other", Affine(seed=3), **AFFINE)
    server = world.serve(world.policy("other", "affine"))
    (world.models.root / "other" / "config.pbtxt").write_text(ONNX)
    ended = server.executor()
    os.kill(ended, signal.SIGKILL)
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))
    assert server.executor() != ended
    status, answer = server.infer("other", [floats("x", X)])
    assert status == 503
    assert "onnxruntime_onnx" in answer["error"]


def test_inputs_go_by_the_index_in_their_names(world):
    world.models.add("difference", Difference(), {"INPUT__1": ("TYPE_FP32", [1]), "INPUT__0": ("TYPE_FP32", [1])},
                     {"OUTPUT__0": ("TYPE_FP32", [1])})
    server = world.serve(world.policy("difference"))
    ten, one = torch.tensor([[10.0], [20.0]]), torch.tensor([[1.0], [2.0]])
    answer = server.outputs("difference", [floats("INPUT__0", ten), floats("INPUT__1", one)])[0]
    assert torch.equal(answer, ten - one)


def test_requests_have_the_dims_and_the_model_the_shape_of_its_reshape(world, affine):
    config = world.models.root / "affine" / "config.pbtxt"
    text = config.read_text()
    for dims, given, shape in (("3", "3, 1", "3"), ("2", "1, 2", "2")):
        assert text.count(f"dims: [ {dims} ]") == 1, text
        text = text.replace(f"dims: [ {dims} ]", f"dims: [ {given} ] reshape {{ shape: [ {shape} ] }}")
    config.write_text(text)
    server = world.serve(world.policy("affine"))
    answer = server.outputs("affine", [floats("x", X[:, :, None])])[0]
    torch.testing.assert_close(answer, affine(X)[:, None])
    assert server.request("/v2/models/affine")[1]["inputs"][0]["shape"] == [-1, 3, 1]
    status, refused = server.infer("affine", [floats("x", X)])
    assert status == 400, refused


def test_an_output_that_contradicts_the_configuration_is_the_configurations_fault(world):
    world.models.add("numbers", Numbers(), {"x": ("TYPE_FP32", [3])}, {"y": ("TYPE_FP32", [3])})
    server = world.serve(world.policy("numbers"))
    for _ in range(2):
        status, answer = server.infer("numbers", [floats("x", X)])
        assert status == 500
        assert "output 'y' is INT64" in answer["error"]
        assert "config.pbtxt" in answer["error"]
    assert server.log().count("contradicts its configuration model=numbers") == 1
    assert "a bug in the server" not in server.log()


def test_batches_have_one_size_and_a_largest(world):
    world.models.add("difference", Difference(), {"a": ("TYPE_FP32", [1]), "b": ("TYPE_FP32", [1])}, {"y": ("TYPE_FP32", [1])})
    config = world.models.root / "difference" / "config.pbtxt"
    config.write_text(config.read_text().replace(f"max_batch_size: {2**20}", "max_batch_size: 8"))
    server = world.serve(world.policy("difference"))
    eight, nine = torch.ones(8, 1), torch.ones(9, 1)
    assert len(server.outputs("difference", [floats("a", eight), floats("b", eight)])[0]) == 8
    status, answer = server.infer("difference", [floats("a", nine), floats("b", nine)])
    assert status == 400
    assert "9 rows" in answer["error"]
    assert "at most 8" in answer["error"]
    status, answer = server.infer("difference", [floats("a", eight), floats("b", eight[:1])])
    assert status == 400
    assert answer["error"] == ("input 'a' has 8 rows and input 'b' has 1; the first dimension of all inputs of model 'difference' "
                               "is its batch, and must be equal")


@pytest.mark.parametrize(("save", "words"), [
    (lambda module, path: torch.save(module.state_dict(), path), "is a state dict, the weights of a model without its code"),
    (torch.save, "is a pickled object of the Python class server_models.Affine"),
    (lambda module, path: torch.save({"model": module.state_dict()}, path), "is a pickled dictionary"),
    (lambda module, path: torch.save(module.state_dict(), path, _use_new_zipfile_serialization=False), "is a Python pickle"),
    (lambda module, path: Path(path).write_bytes(pickle.dumps(module.state_dict())), "is a Python pickle"),
], ids=["state_dict", "module", "checkpoint", "old", "pickle"])
def test_what_torch_save_writes_is_refused_in_one_sentence(world, affine, save, words):
    file = world.models.root / "affine" / "1" / "model.pt"
    save(affine, str(file))
    code, message = world.refused(world.policy("affine"))
    assert code == 2, message
    assert f"{file} {words}" in message
    assert 'torch.jit.script(model.eval()).save("model.pt")' in message
    assert "corrupted" not in message
    assert len([line for line in message.splitlines() if "model.pt" in line]) == 1
