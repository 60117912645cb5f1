"""Engines that are found by the model in the body (`api: openai`), with OpenAI's own Python client as it is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from pathlib import Path

import openai
import pytest
from patience import PATIENCE_SECONDS, eventually
from serving import Server

PROGRAM = Path(__file__).with_name("engine_server.py")
WORDS = "once upon a time there was"


def engine(name: str, *, models: str = "", served: str = "", more: str = "", arguments: str = "") -> str:
    """A line of `models`."""
    names = f", served_names: [{served}]" if served else ""
    return (f"  - {{name: {name}, slo: {{latency: 2s}}, engine: {{command: [{sys.executable}, {PROGRAM}, --port, '{{port}}', --models, "
            f"'{models or name}'{arguments}], ready: /health, api: openai{names}{more}}}}}")


@pytest.fixture
def serve(world):
    def start(*engines: str, server: str = "request_timeout: 30s") -> Server:
        path = world.folder / "policy.yaml"
        path.write_text("\n".join(["version: 1", f"server: {{{server}}}", "pool: {backend: host, memory: 64MiB}", "models:", *engines]) + "\n",
                        encoding="utf-8")
        return world.serve(path)
    return start


@contextlib.contextmanager
def client_of(server: Server, api_key: str = "none"):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_SECONDS) as made:
        yield made


@pytest.fixture
def two(serve):
    """Two engines at one address; what one calls its model has a slash."""
    return serve(engine("small"), engine("large", models="org/large,large-lora", served="org/large, large-lora"))


def state(server: Server, name: str) -> dict:
    return next(each for each in server.status()["engines"] if each["name"] == name)


def post(server: Server, path: str, body: bytes, **headers: str) -> tuple[int, http.client.HTTPMessage, dict]:
    client = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE_SECONDS)
    with contextlib.closing(client):
        client.request("POST", path, body, {"Content-Type": "application/json"} | headers)
        answer = client.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def ask_engine(server: Server, name: str, path: str, method: str = "GET") -> bytes:
    """Past the server."""
    host, _, port = state(server, name)["address"].partition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_SECONDS)
    with contextlib.closing(client):
        client.request(method, path)
        return client.getresponse().read()


def test_each_request_reaches_the_engine_that_has_its_model(two):
    with client_of(two) as client:
        answers = [client.chat.completions.create(model=name, messages=[{"role": "user", "content": WORDS}])
                   for name in ("small", "org/large", "large-lora", "small")]
        assert [answer.choices[0].message.content for answer in answers] == [WORDS] * 4
        engines = [answer.id for answer in answers]
        assert engines[0] == engines[3] != engines[1] == engines[2]
        assert client.completions.create(model="small", prompt=WORDS).choices[0].text == WORDS
        assert client.embeddings.create(model="org/large", input="abc", encoding_format="float").data[0].embedding == [0.5, 3.0]
    assert (state(two, "small")["answered"], state(two, "large")["answered"]) == (3, 3)


def test_a_stream_comes_event_by_event(two):
    with client_of(two) as client:
        stream = client.chat.completions.create(model="small", messages=[{"role": "user", "content": WORDS}], stream=True,
                                                extra_body={"hold": True})
        words = (chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        assert next(words) == "once"  # while the engine has not gone on
        ask_engine(two, "small", "/v1/go", "POST")
        assert list(words) == WORDS.split()[1:]
        text = client.completions.create(model="org/large", prompt=WORDS, stream=True)
        assert [chunk.choices[0].text for chunk in text if chunk.choices[0].text] == WORDS.split()


def test_a_stream_that_its_engine_breaks_off_ends_with_an_error_that_the_client_knows(two):
    with client_of(two) as client:
        stream = client.chat.completions.create(model="small", messages=[{"role": "user", "content": WORDS}], stream=True,
                                                extra_body={"hold": True})
        words = (chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        assert next(words) == "once"
        os.kill(state(two, "small")["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine 'small' ended, or closed the connection, before its answer was whole") as told:
            list(words)
        assert not isinstance(told.value, openai.APIConnectionError)
        assert told.value.type == "server_error"
    seen = eventually(lambda: state(two, "small")["failed"] == 1 and state(two, "small"), "it counts")
    assert (seen["broken_off"], seen["answered"]) == (1, 0)


def test_the_times_of_tokens_are_measured_and_held_against_the_promise(serve):
    server = serve(engine("small").replace("latency: 2s", "latency: 2s, ttft: 1h, tbt: 1us"))
    with client_of(server) as client:
        client.completions.create(model="small", prompt=WORDS)
        seen = state(server, "small")
        assert (sum(seen["ttft"]["counts"]), seen["observed_ttft_attainment"], seen["observed_tbt_attainment"]) == (0, None, None)
        stream = client.chat.completions.create(model="small", messages=[{"role": "user", "content": WORDS}], stream=True,
                                                extra_body={"hold": True})
        words = (chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        next(words)
        assert sum(state(server, "small")["ttft"]["counts"]) == 1  # while it goes on
        ask_engine(server, "small", "/v1/go", "POST")
        assert len(list(words)) == 5
    eventually(lambda: state(server, "small")["answered"] == 2, "it is over")
    seen = state(server, "small")
    assert (sum(seen["ttft"]["counts"]), sum(seen["tbt"]["counts"])) == (1, 5)
    assert seen["observed_ttft_attainment"] == 1.0
    assert seen["observed_tbt_attainment"] < 1.0  # it was held behind the first
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_SECONDS) as answer:
        metrics = answer.read().decode()
    assert 'sluice_engine_time_to_first_token_seconds_count{engine="small"} 1' in metrics
    assert 'sluice_engine_inter_token_latency_seconds_bucket{engine="small",le="+Inf"} 5' in metrics
    assert 'sluice_engine_ttft_attainment_observed_ratio{engine="small"} 1' in metrics


def test_an_image_before_the_model_passes_whole(two):
    picture = "data:image/png;base64," + "iVBORw0KGgo" * 500_000
    with client_of(two) as client:
        answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": [
            {"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": picture}}]}])
    assert answer.choices[0].message.content == WORDS


def test_models_are_listed_without_waking_an_engine_and_then_as_it_says(two):
    with client_of(two) as client:
        cold = {model.id: model for model in client.models.list()}
        assert list(cold) == ["small", "large", "org/large", "large-lora"]
        assert cold["small"].owned_by == "sluice"
        assert client.models.retrieve("org/large").id == "org/large"
        assert state(two, "small")["state"] == state(two, "large")["state"] == "cold"
        client.completions.create(model="org/large", prompt="x")
        eventually(lambda: [model.id for model in client.models.list()] == ["small", "org/large", "large-lora"], "it has said what it has")
        assert client.models.retrieve("org/large").owned_by == "tests"
        assert client.models.retrieve("org/large").root == "/srv/weights"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("medium")
    assert state(two, "small")["state"] == "cold"
    assert "engine does not list names" in two.log()


def test_errors_are_those_that_the_client_knows(two):
    with client_of(two) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="medium", messages=[{"role": "user", "content": "x"}])
        assert (unknown.value.code, unknown.value.param, unknown.value.type) == ("model_not_found", "model", "invalid_request_error")
        assert "large, large-lora, org/large, small" in unknown.value.message
        with pytest.raises(openai.NotFoundError, match="the engine has no large"):  # its own words
            client.completions.create(model="large", prompt="x")
        with pytest.raises(openai.BadRequestError) as none:
            client.post("/responses", cast_to=object, body={"input": "x"})
        assert none.value.param == "model"
    assert [post(two, "/v1/completions", body)[0] for body in (b"", b"{", b"[]", b'{"model": "small", "model": "small"}')] == [400] * 4


def test_who_is_turned_away_hears_when_to_come_again(serve):
    server = serve(engine("small", arguments=", --fail, 'no weights'"))
    with client_of(server) as client, pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="small", prompt="x")
    assert refused.value.status_code == 503
    assert refused.value.type == "server_error"
    assert "no weights" in refused.value.message
    assert int(refused.value.response.headers["Retry-After"]) >= 1


def test_the_servers_token_is_the_clients_api_key(serve, world):
    (world.folder / "tokens").write_text("4f6fa2b1\n", encoding="utf-8")
    (world.folder / "tokens").chmod(0o600)
    server = serve(engine("small"), server="token_file: tokens")
    with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert refused.value.code == "invalid_api_key"
    with client_of(server, "4f6fa2b1") as client:
        assert client.completions.create(model="small", prompt=WORDS).choices[0].text == WORDS


def test_other_paths_lead_to_engines_as_before(serve):
    server = serve(engine("small", more=", routes: [/v1/audio/*, /tokenize]"))
    client = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE_SECONDS)
    with contextlib.closing(client):
        client.request("POST", "/v1/audio/speech", b"not JSON")
        answer = client.getresponse()
        assert (answer.status, answer.read()) == (404, b"nothing here")  # the engine's


# ---- clients that are not as they should be

def test_a_thousand_streams_at_once_each_get_their_own(serve):
    server = serve(engine("small", more=", max_requests: 1000, start: at_boot"), engine("large", more=", max_requests: 1000, start: at_boot"))
    eventually(lambda: server.request("/v2/health/ready")[0] == 200, "both are ready")
    count = 500

    def stream(number: int) -> bool:
        """Of a word that nobody else has."""
        body = json.dumps({"prompt": f"w{number} x{number} y{number}", "stream": True, "hold": True, "model": ("small", "large")[number % 2]})
        with socket.create_connection(("127.0.0.1", port_of(server)), PATIENCE_SECONDS) as client:
            client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            held.release()
            said = b"".join(iter(lambda: client.recv(1 << 16), b""))
        return all(f'"{letter}{number}"'.encode() in said for letter in "wxy") and said.count(b"data: {") == 4 and b"[DONE]" in said

    held = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(2 * count) as clients:
        answers = [clients.submit(stream, number) for number in range(2 * count)]
        for _ in range(2 * count):
            assert held.acquire(timeout=PATIENCE_SECONDS)
        eventually(lambda: [state(server, name)["in_flight"] for name in ("small", "large")] == [count, count], "all are there at once")
        for name in ("small", "large"):
            ask_engine(server, name, "/v1/go", "POST")
        assert all(answer.result() for answer in answers)
    assert [state(server, name)["answered"] for name in ("small", "large")] == [count, count]


def test_a_client_that_leaves_within_a_stream_frees_the_engine(two):
    with client_of(two) as client:
        stream = client.completions.create(model="small", prompt=WORDS, stream=True, extra_body={"hold": True})
        assert next(iter(stream)).choices[0].text == "once"
        stream.close()
    eventually(lambda: state(two, "small")["client_left"] == 1, "it has been seen to leave")
    eventually(lambda: json.loads(ask_engine(two, "small", "/v1/seen"))["left"] == 1, "the engine has seen it, too")


def test_a_body_that_comes_byte_by_byte_or_ends_too_soon_harms_nobody(two):
    body = json.dumps({"prompt": WORDS, "model": "small"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port_of(two)), PATIENCE_SECONDS) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(head)
        for byte in body:
            client.sendall(bytes([byte]))
        assert WORDS.encode() in b"".join(iter(lambda: client.recv(1 << 16), b""))
    for cut in range(0, len(body), 7):
        with socket.create_connection(("127.0.0.1", port_of(two)), PATIENCE_SECONDS) as client:
            client.sendall(head + body[:cut])
            client.shutdown(socket.SHUT_WR)
            assert b" 200 " not in b"".join(iter(lambda: client.recv(1 << 16), b""))
    with client_of(two) as client:
        assert client.completions.create(model="small", prompt=WORDS).choices[0].text == WORDS
    assert state(two, "small")["answered"] == 2
