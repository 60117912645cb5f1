"""The server as its users meet it: `sluice serve`, started for real on the host backend, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine, Raising, RaisingLines, Slow, TinyNet
from serving import Server, floats, integer

INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, OUT_OF_MEMORY, UNSUPPORTED = 2, 3, 4, 5, 8


@pytest.fixture
def affine(world):
    return world.models.add("affine", Affine(padding_mib=8), **AFFINE)


X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])


def test_first_request_loads_the_model_and_the_second_finds_it(world, affine):
    server = world.serve(world.policy("affine"))
    assert server.model("affine")["state"] == "cold"
    assert world.pool()["serving_bytes"] == 0
    for _ in range(2):
        torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))
    seen = server.model("affine")
    assert (seen["state"], seen["cold_starts"], seen["requests"], seen["failed"]) == ("warm", 1, 2, 0)
    weights = sum(each.numel() * each.element_size() for each in affine.parameters())
    assert weights <= seen["bytes"] < weights + 4096
    assert seen["bytes"] <= world.pool()["serving_bytes"] < seen["bytes"] + 2 * 2**21
    latency = server.status()["latency_ms"]
    assert (latency["cold"]["n"], latency["warm"]["n"]) == (1, 1)
    assert "cold start model=affine" in server.log()


def test_answers_of_a_network_are_those_of_eager_pytorch(world):
    net = world.models.add("net", TinyNet(), {"image": ("TYPE_FP32", [1, 8, 8])},
                           {"logits": ("TYPE_FP32", [10]), "best": ("TYPE_INT64", [])})
    server = world.serve(world.policy("net"))
    image = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = net(image)
    logits, best = server.outputs("net", [floats("image", image)])
    torch.testing.assert_close(logits, expected[0])
    assert torch.equal(best, expected[1])
    only_best = server.outputs("net", [floats("image", image)], outputs=[{"name": "best"}])
    assert len(only_best) == 1
    assert torch.equal(only_best[0], expected[1])


def test_an_idle_model_gives_its_memory_back_and_is_right_when_it_returns(world, affine):
    server = world.serve(world.policy("affine", idle="200ms"))
    for round_number in (1, 2, 3):
        torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))
        eventually(lambda: server.model("affine")["state"] == "cold", "the model is released")
        assert world.pool()["serving_bytes"] == 0
        assert server.model("affine")["cold_starts"] == round_number


def test_watching_neither_wakes_a_model_nor_keeps_it_awake(world, affine):
    server = world.serve(world.policy("affine", idle="300ms"))
    paths = ["/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/affine", "/v2/models/affine/ready",
             "/v2/models/affine/config", "/v2/models/stats", "/v2/sluice/status"]

    def watch() -> None:
        for path in paths:
            server.request(path)

    for _ in range(3):
        watch()
    assert server.model("affine")["cold_starts"] == 0
    server.outputs("affine", [floats("x", X)])

    def released() -> bool:
        watch()
        return server.model("affine")["state"] == "cold"

    eventually(released, "the model is released although it is being watched")


def test_readiness_tells_cold_from_warm(world, affine):
    server = world.serve(world.policy("affine"))
    assert server.request("/v2/health/ready")[0] == 200
    status, answer = server.request("/v2/models/affine/ready")
    assert status == 503
    assert "cold" in answer["error"]
    server.outputs("affine", [floats("x", X)])
    assert server.request("/v2/models/affine/ready") == (200, {"name": "affine", "ready": True})


@pytest.mark.parametrize(("body", "words"), [
    (b"{", []),
    (b"[]", []),
    (b"{}", ["inputs"]),
    (json.dumps({"inputs": []}).encode(), ["x"]),
    (json.dumps({"inputs": [floats("z", X)]}).encode(), ["z"]),
    (json.dumps({"inputs": [floats("x", X[:, :2])]}).encode(), ["x", "[2,2]"]),
    (json.dumps({"inputs": [{**floats("x", X), "shape": [2, 4]}]}).encode(), ["x"]),
    (json.dumps({"inputs": [{**floats("x", X), "datatype": "INT64"}]}).encode(), ["x", "INT64", "FP32"]),
    (json.dumps({"inputs": [{**floats("x", X), "datatype": "FP31"}]}).encode(), ["FP31"]),
    (json.dumps({"inputs": [{**floats("x", X), "data": [1, 2, "three", 4, 5, 6]}]}).encode(), ["x"]),
    (json.dumps({"inputs": [floats("x", X)], "outputs": [{"name": "nothing"}]}).encode(), ["nothing"]),
])
def test_a_malformed_request_is_told_what_is_wrong_and_harms_nobody(world, affine, body, words):
    server = world.serve(world.policy("affine"))
    status, answer = server.request("/v2/models/affine/infer", body)
    assert status == 400, answer
    for word in words:
        assert word in answer["error"]
    assert "\n" not in answer["error"]
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))


def limited(world, settings: str) -> Server:
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("server: {", f"server: {{{settings}, "))
    return world.serve(policy)


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), PATIENCE_SECONDS)


def begin_a_body(client: socket.socket, length: int) -> str:
    """What the server says to a header that announces it."""
    client.sendall(b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                   b"Content-Length: %d\r\n\r\n" % length)
    return client.recv(65536).decode()


def test_limits_of_bodies_are_those_of_the_policy(world, affine):
    server = limited(world, "max_body: 4MiB, max_waiting_bodies: 300KiB")

    def begun() -> str:
        with connected(server) as second:
            return begin_a_body(second, 100 << 10)

    with connected(server) as too_large, connected(server) as first, connected(server) as small:
        assert begin_a_body(too_large, (4 << 20) + 1).startswith("HTTP/1.1 413 ")
        assert begin_a_body(first, 3 << 20).startswith("HTTP/1.1 100 ")
        assert begun().startswith("HTTP/1.1 100 ")  # what is announced takes no room
        first.sendall(bytes(5 << 19))  # of a body's last MiB nothing may be read before all of it is there
        refused = eventually(lambda: (said := begun()).startswith("HTTP/1.1 503 ") and said, "what has come takes it")
        assert "Retry-After: 1\r\n" in refused and "large bodies" in refused, refused
        assert begin_a_body(small, 10).startswith("HTTP/1.1 100 ")


def test_the_limit_of_connections_is_that_of_the_policy(world, affine):
    server = limited(world, "max_connections: 2")
    with connected(server) as first, connected(server) as second:
        for busy in (first, second):
            assert begin_a_body(busy, 10).startswith("HTTP/1.1 100 ")
        with connected(server) as third:
            third.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            refused = third.recv(65536).decode()
        assert refused.startswith("HTTP/1.1 503 ") and "all 2 connections" in refused, refused


def test_a_header_of_more_than_16_kib_is_refused(world, affine):
    server = limited(world, "threads: 1")
    with connected(server) as client:
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * (16 << 10) + b"\r\n\r\n")
        assert client.recv(65536).decode().startswith("HTTP/1.1 431 ")


def test_unknown_models_versions_and_paths_are_not_found(world, affine):
    server = world.serve(world.policy("affine"))
    for path in ("/v2/models/nobody", "/v2/models/nobody/ready", "/v2/models/affine/versions/7", "/v3"):
        status, answer = server.request(path)
        assert status == 404, path
        assert answer["error"]
    assert server.infer("nobody", [floats("x", X)])[0] == 404


def test_a_model_that_raises_is_told_in_one_line_and_goes_on(world):
    world.models.add("raising", Raising(), **{**AFFINE, "outputs": {"y": ("TYPE_FP32", [3])}})
    server = world.serve(world.policy("raising"))
    for _ in range(2):
        status, answer = server.infer("raising", [floats("x", X)])
        assert status == 500
        assert "negative numbers are not taken" in answer["error"]
        assert "\n" not in answer["error"]
        assert "Traceback" not in answer["error"]
        assert torch.equal(server.outputs("raising", [floats("x", X.abs())])[0], X.abs())


def test_a_model_that_raises_at_each_request_is_logged_once_for_each_text(world):
    world.models.add("raising", Raising(), **{**AFFINE, "outputs": {"y": ("TYPE_FP32", [3])}})
    server = world.serve(world.policy("raising"))
    for _ in range(100):
        assert server.infer("raising", [floats("x", X)])[0] == 500
    said = [line for line in server.log().splitlines() if "negative numbers are not taken" in line]
    assert len(said) == 1, said
    assert "model=raising version=1" in said[0]


def test_a_model_that_raises_several_lines_is_told_with_all_of_them_and_its_name_once(world):
    world.models.add("raising", RaisingLines(), **{**AFFINE, "outputs": {"y": ("TYPE_FP32", [3])}})
    server = world.serve(world.policy("raising"))
    status, answer = server.infer("raising", [floats("x", X)])
    assert status == 500
    assert answer["error"] == "model 'raising': negative numbers are not taken:\n  the first was at\nIndexError: 0"
    assert server.end() == 0
    assert "IndexError: 0" not in server.log().splitlines()


@pytest.mark.parametrize("path", ["/v2/models/affine/generate", "/v2/models/affine/versions/1/generate_stream",
                                  "/v2/systemsharedmemory/status", "/v2/cudasharedmemory/region/a/register"])
@pytest.mark.parametrize("body", [None, b"{}"], ids=["get", "post"])
def test_routes_of_tritons_that_are_not_offered_are_not_implemented(world, affine, path, body):
    server = world.serve(world.policy("affine"))
    status, answer = server.request(path, body)
    assert status == 501, answer
    assert "does not offer" in answer["error"]


def test_the_newest_version_answers_unless_another_is_named(world, affine):
    second = world.models.add("affine", Affine(seed=2), **AFFINE, version="2")
    config = world.models.root / "affine" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { all {} }\n")
    server = world.serve(world.policy("affine"))
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], second(X))
    torch.testing.assert_close(server.outputs("affine/versions/1", [floats("x", X)])[0], affine(X))


def test_concurrent_requests_on_two_models_get_their_own_answers(world, affine):
    other = world.models.add("other", Affine(seed=9, padding_mib=6), **AFFINE)
    server = world.serve(world.policy("affine", "other", memory="12MiB"))  # room for one at a time
    references = {"affine": affine, "other": other}

    def ask(number: int) -> None:
        name = "affine" if number % 3 else "other"
        x = torch.randn(1 + number % 4, 3, generator=torch.Generator().manual_seed(number))
        torch.testing.assert_close(server.outputs(name, [floats("x", x)])[0], references[name](x))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(60)))
    seen = server.status()
    assert seen["requests"] == {"total": 60, "failed": 0, "in_flight": 0}
    assert all(each["cold_starts"] > 0 for each in seen["models"])


def test_a_request_that_waits_longer_than_its_timeout_is_told_so(world):
    world.models.add("slow", Slow(), {"n": ("TYPE_INT64", [1])}, {"rounds": ("TYPE_INT64", [1])}, batched=False)
    server = world.serve(world.policy("slow"))

    def told(pool: ThreadPoolExecutor) -> bool:
        """Whether it was while another one was computed."""
        long_one = pool.submit(server.outputs, "slow", [integer("n", 1500)])
        eventually(lambda: server.status()["requests"]["in_flight"] == 1 or long_one.done(), "the first request runs")
        status, answer = server.infer("slow", [integer("n", 1)], parameters={"timeout": 1000})
        was_beside = not long_one.done()
        assert int(long_one.result()[0]) == 1500
        if was_beside:
            assert status == 504, answer
            assert "slow" in answer["error"]
        return was_beside

    with ThreadPoolExecutor(1) as pool:
        eventually(lambda: told(pool), "the second comes while the first is computed")


def test_requests_in_flight_are_answered_before_the_server_ends(world):
    world.models.add("slow", Slow(), {"n": ("TYPE_INT64", [1])}, {"rounds": ("TYPE_INT64", [1])}, batched=False)
    server = world.serve(world.policy("slow"))
    executor = server.executor()
    with ThreadPoolExecutor(3) as pool:
        os.kill(executor, signal.SIGSTOP)  # until all are there
        answers = [pool.submit(server.outputs, "slow", [integer("n", 150)]) for _ in range(3)]
        eventually(lambda: server.status()["requests"]["in_flight"] == 3, "three requests are in flight")
        server.process.send_signal(signal.SIGTERM)
        os.kill(executor, signal.SIGCONT)
        assert server.process.wait(PATIENCE_SECONDS) == 0, server.log()
        assert [int(each.result()[0]) for each in answers] == [150] * 3
    assert world.pool()["serving_bytes"] == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0


def test_always_warm_models_are_loaded_before_the_first_request(world, affine):
    policy = world.policy("affine")
    policy.write_text(policy.read_text().replace("mode: fixed, max_idle: 10m", "mode: always"))
    server = world.serve(policy)
    assert server.model("affine")["state"] == "warm"
    assert server.model("affine")["idle_timeout_s"] is None
    torch.testing.assert_close(server.outputs("affine", [floats("x", X)])[0], affine(X))
    assert server.status()["latency_ms"]["cold"]["n"] == 0


def test_the_pool_shows_which_model_holds_which_chunks(world, affine, sluice):
    server = world.serve(world.policy("affine"))
    server.outputs("affine", [floats("x", X)])
    shown = json.loads(subprocess.run([sluice, "pool", "show", "--json"], capture_output=True, check=True).stdout)
    held = [run for run in shown["runs"] if run["owner"] == "serving"]
    assert {run["holds"] for run in held} == {"affine"}
    chunk = shown["pool"]["chunk_bytes"]
    assert sum(run["count"] for run in held) == -(-server.model("affine")["bytes"] // chunk)


def test_small_models_share_a_chunk_and_the_pool_says_so(world, sluice):
    modules = {name: world.models.add(name, Affine(seed=seed), **AFFINE) for seed, name in enumerate(("one", "two"))}
    server = world.serve(world.policy(*modules))
    for _ in range(2):
        for name, module in modules.items():
            torch.testing.assert_close(server.outputs(name, [floats("x", X)])[0], module(X))
    shown = json.loads(subprocess.run([sluice, "pool", "show", "--json"], capture_output=True, check=True).stdout)
    held = [run for run in shown["runs"] if run["owner"] == "serving"]
    assert [(run["holds"], run["count"]) for run in held] == [("2 models", 1)]


def test_the_status_tells_promise_prediction_and_load_times(world, affine):
    server = world.serve(world.policy("affine"))
    for _ in range(5):
        server.outputs("affine", [floats("x", X)])
    eventually(lambda: server.model("affine")["observed_requests"] == 5, "the scheduler has seen the requests")
    seen = server.model("affine")
    assert seen["slo"] == {"percentile": 0.99, "latency_ms": 500.0, "attainment": 0.99, "window_s": 300.0}
    assert 0.0 < seen["observed_attainment"] <= 1.0  # one may be late on a machine with much to do
    assert 0.0 <= seen["predicted_attainment"] <= 1.0
    assert seen["idle_timeout_s"] == 600.0
    assert seen["load_ms"] > 0
    handover = server.status()["handovers"][0]
    assert handover["model"] == "affine"
    assert handover["total_us"] > 0
    assert handover["load_us"] > 0


@pytest.mark.parametrize("kind", ["file", "model", "repository"])
def test_a_missing_model_ends_the_start_with_its_name(world, affine, kind):
    policy = world.policy("affine", "absent")
    if kind == "file":
        policy = world.policy("affine")
        (world.models.root / "affine" / "1" / "model.pt").unlink()
    elif kind == "repository":
        policy.write_text(policy.read_text().replace(str(world.models.root), "/nowhere/models"))
    code, message = world.refused(policy)
    assert code == NOT_FOUND, message
    assert {"file": "affine", "model": "absent", "repository": "/nowhere/models"}[kind] in message


def test_a_file_that_is_no_torchscript_ends_the_start(world, affine):
    file = world.models.root / "affine" / "1" / "model.pt"
    file.write_bytes(b"this is no model")
    code, message = world.refused(world.policy("affine"))
    assert code == INVALID_ARGUMENT, message
    assert str(file) in message
    assert "frame #" not in message


def test_a_model_with_text_tensors_is_unsupported(world, affine):
    world.models.configure("affine", {"x": ("TYPE_STRING", [3])}, AFFINE["outputs"])
    code, message = world.refused(world.policy("affine"))
    assert code == UNSUPPORTED, message
    assert "BYTES" in message


def test_every_mistake_of_a_policy_is_told(world, affine):
    policy = world.policy("affine")
    policy.write_text("version: 1\nserver: {prot: 80}\npool: {memory: 3}\nmodels: [{name: affine}]\n")
    code, message = world.refused(policy)
    assert code == INVALID_ARGUMENT, message
    for place in ("server.prot", "pool.memory", "models[0].slo"):
        assert place in message


def test_a_taken_port_ends_the_start(world, affine):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        policy = world.policy("affine")
        policy.write_text(policy.read_text().replace("server: {", f"server: {{port: {port}, "))
        server = Server(world.program, policy, world.folder / "taken.log", "--port", str(port))
        world.servers.append(server)
        assert server.process.wait(PATIENCE_SECONDS) == ALREADY_EXISTS, server.log()
        assert str(port) in server.log()


def test_a_second_server_on_a_pool_is_refused_and_the_first_goes_on(world, affine):
    policy = world.policy("affine")
    first = world.serve(policy)
    code, message = world.refused(policy)
    assert code == ALREADY_EXISTS, message
    assert first.url.removeprefix("http://") in message and str(first.executor()) not in message, message
    torch.testing.assert_close(first.outputs("affine", [floats("x", X)])[0], affine(X))
    assert first.end() == 0
    successor = world.serve(policy)
    torch.testing.assert_close(successor.outputs("affine", [floats("x", X)])[0], affine(X))


def test_a_pool_larger_than_the_machine_is_refused(world, affine):
    code, message = world.refused(world.policy("affine", memory="900TiB"))
    assert code == OUT_OF_MEMORY, message
    assert "900 TiB" in message or "900TiB" in message or "GiB" in message


def test_a_model_larger_than_the_pool_is_refused_at_start(world, affine):
    code, message = world.refused(world.policy("affine", memory="4MiB"))
    assert code == OUT_OF_MEMORY, message
    assert "affine" in message


def test_a_successor_of_a_killed_server_serves_from_the_same_pool(world, affine):
    policy = world.policy("affine")
    first = world.serve(policy)
    first.outputs("affine", [floats("x", X)])
    pool_id = world.pool()["id"]
    first.process.kill()
    first.process.wait()
    eventually(lambda: world.pool()["serving_bytes"] == 0, "the dead server's memory is taken back")
    second = world.serve(policy)
    torch.testing.assert_close(second.outputs("affine", [floats("x", X)])[0], affine(X))
    assert world.pool()["id"] == pool_id


def kill(world, server) -> None:
    """Once all that is warm there would outlive it."""
    eventually(lambda: all(each["outlives_server"] for each in server.status()["models"] if each["state"] == "warm"), "it is published")
    server.process.kill()
    server.process.wait()
    eventually(lambda: not any(each["kind"] == "server" for each in world.status()["clients"]), "the broker has noticed")


def taken_over(server) -> dict[str, tuple[int, int]]:
    """By model: bytes that a dead server had warm, and how many of them were copied anew."""
    found = re.findall(r"took over a warm model model=(\S+) bytes=(\d+) copied_bytes=(\d+)", server.log())
    return {model: (int(held), int(copied)) for model, held, copied in found}


def test_a_server_that_is_killed_comes_back_with_its_warm_models(world):
    models = {name: world.models.add(name, Affine(seed, padding_mib=size), **AFFINE)
              for seed, (name, size) in enumerate({"large": 5.0, "small": 0.3, "tiny": 0.1, "cold": 1.0}.items())}
    policy = world.policy(*models)
    first = world.serve(policy)
    for name in ("large", "small", "tiny"):
        first.outputs(name, [floats("x", X)])
    held = world.pool()["serving_bytes"]
    kill(world, first)
    second = world.serve(policy)
    assert {name: second.model(name)["state"] for name in models} == {"large": "warm", "small": "warm", "tiny": "warm", "cold": "cold"}
    assert set(taken_over(second)) == {"large", "small", "tiny"} and not any(copied for _, copied in taken_over(second).values())
    assert world.pool()["serving_bytes"] == held
    for name, model in models.items():
        torch.testing.assert_close(second.outputs(name, [floats("x", X)])[0], model(X), rtol=0, atol=0)
    assert [second.model(name)["cold_starts"] for name in models] == [0, 0, 0, 1]
    kill(world, second)  # what was taken over is left again
    third = world.serve(policy)
    assert set(taken_over(third)) == set(models)
    for name, model in models.items():
        torch.testing.assert_close(third.outputs(name, [floats("x", X)])[0], model(X), rtol=0, atol=0)
    assert third.end() == 0
    assert world.pool()["serving_bytes"] == 0


def test_what_a_server_had_warm_that_died_computing_is_copied_anew(world):
    world.models.add("slow", Slow(), {"n": ("TYPE_INT64", [1])}, {"rounds": ("TYPE_INT64", [1])}, batched=False)
    policy = world.policy("slow")
    first = world.serve(policy)
    first.outputs("slow", [integer("n", 2)])
    with ThreadPoolExecutor(1) as pool:
        long_one = pool.submit(first.infer, "slow", [integer("n", 1_000_000)])
        eventually(lambda: first.model("slow")["computing"] == 1, "a request is computed")
        kill(world, first)
        assert long_one.exception() is not None
    second = world.serve(policy)
    (held, copied), = taken_over(second).values()
    assert held == copied > 0
    assert int(second.outputs("slow", [integer("n", 3)])[0]) == 3
    kill(world, second)
    (held, copied), = taken_over(world.serve(policy)).values()
    assert held > 0 and copied == 0


def read_so_far(server) -> int:
    """Bytes that the process has read, as the kernel counts them: its libraries are mapped, not read."""
    return int(re.search(r"rchar: (\d+)", Path(f"/proc/{server.executor()}/io").read_text())[1])


def leave_warm(world, *models, memory: str = "256MiB"):
    """Adds these, of 64 MiB each, kills a server with the first one warm, and starts another: models, policy, that server."""
    made = {name: world.models.add(name, Affine(seed, padding_mib=64), **AFFINE) for seed, name in enumerate(models)}
    policy = world.policy(*models, memory=memory)
    first = world.serve(policy)
    torch.testing.assert_close(first.outputs(models[0], [floats("x", X)])[0], made[models[0]](X), rtol=0, atol=0)
    kill(world, first)
    return made, policy, world.serve(policy)


def test_a_model_that_was_taken_over_answers_before_its_weights_are_read(world):
    made, policy, second = leave_warm(world, "large")
    seen = second.model("large")
    assert seen["state"] == "warm" and seen["image_bytes"] == 0
    assert 0 < seen["file_read_bytes"] < seen["bytes"] / 64
    assert read_so_far(second) < seen["bytes"] / 8
    torch.testing.assert_close(second.outputs("large", [floats("x", X)])[0], made["large"](X), rtol=0, atol=0)
    eventually(lambda: second.model("large")["image_bytes"] == seen["bytes"], "the image is made once it has answered")
    assert seen["bytes"] <= second.model("large")["file_read_bytes"] < seen["bytes"] * 9 / 8
    assert read_so_far(second) >= seen["bytes"]
    (_, copied), = taken_over(second).values()
    assert copied == 0 and second.model("large")["cold_starts"] == 0
    assert second.end() == 0
    third = world.serve(policy)
    assert third.model("large")["image_bytes"] == seen["bytes"], "with nothing to take over it is ready with its image"


def test_a_model_that_was_taken_over_and_went_cold_is_loaded_from_its_file(world):
    made, _, second = leave_warm(world, "large", "other", memory="96MiB")
    for round in (1, 2):  # there is room for one of them
        for name in ("other", "large"):
            torch.testing.assert_close(second.outputs(name, [floats("x", X)])[0], made[name](X), rtol=0, atol=0)
            assert second.model(name)["cold_starts"] == round and second.model(name)["image_bytes"] == second.model(name)["bytes"]


def test_a_warm_model_whose_file_is_written_to_serves_until_it_goes_cold(world):
    made, policy, second = leave_warm(world, "large", "other", memory="96MiB")
    file = world.models.root / "large" / "1" / "model.pt"
    contents = file.read_bytes()
    file.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    for _ in range(2):
        torch.testing.assert_close(second.outputs("large", [floats("x", X)])[0], made["large"](X), rtol=0, atol=0)
    second.outputs("other", [floats("x", X)])
    status, answer = second.infer("large", [floats("x", X)])
    assert status == 503 and str(file) in answer["error"], answer
    second.outputs("other", [floats("x", X)])
    assert second.end() == 0
    file.write_bytes(contents)
    torch.testing.assert_close(world.serve(policy).outputs("large", [floats("x", X)])[0], made["large"](X), rtol=0, atol=0)


def test_a_warm_model_whose_file_has_gone_is_loaded_again_from_what_was_opened(world):
    made, _, second = leave_warm(world, "large", "other", memory="96MiB")
    (world.models.root / "large" / "1" / "model.pt").unlink()
    for name in ("other", "large"):
        torch.testing.assert_close(second.outputs(name, [floats("x", X)])[0], made[name](X), rtol=0, atol=0)


@pytest.mark.parametrize("becomes", ["other weights", "not served"])
def test_memory_of_a_dead_server_that_is_of_no_use_goes_back(world, affine, becomes):
    other = world.models.add("other", Affine(5, padding_mib=3.0), **AFFINE)
    policy = world.policy("affine", "other")
    first = world.serve(policy)
    for name in ("affine", "other"):
        first.outputs(name, [floats("x", X)])
    both = world.pool()["serving_bytes"]
    kill(world, first)
    if becomes == "other weights":
        file = world.models.root / "other" / "1" / "model.pt"
        file.unlink()
        other = Affine(6, padding_mib=3.0).eval()
        torch.jit.script(other).save(str(file))
    second = world.serve(policy if becomes == "other weights" else world.policy("affine"))
    assert set(taken_over(second)) == {"affine"}
    assert 0 < world.pool()["serving_bytes"] < both
    torch.testing.assert_close(second.outputs("affine", [floats("x", X)])[0], affine(X), rtol=0, atol=0)
    if becomes == "other weights":
        torch.testing.assert_close(second.outputs("other", [floats("x", X)])[0], other(X), rtol=0, atol=0)


def test_the_weights_of_cold_models_are_not_in_the_servers_own_memory(world):
    world.models.add("large", Affine(padding_mib=192), **AFFINE)
    world.models.add("small", Affine(), **AFFINE)

    def anonymous_mib(server: Server) -> float:
        text = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) / 1024

    with_large = world.serve(world.policy("large", memory="256MiB"))
    large = anonymous_mib(with_large)
    assert with_large.end() == 0
    small = anonymous_mib(world.serve(world.policy("small", memory="256MiB")))
    assert large - small < 64, "a cold model's 192 MiB belong to the page cache"
