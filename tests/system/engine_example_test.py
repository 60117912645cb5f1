"""The example's engine, examples/engine, behind a server: FastAPI and transformers, as they are."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import eventually
from serving import Server

ENGINE = Path(__file__).resolve().parents[2] / "examples" / "engine"
START_SECONDS = 280.0  # torch and transformers are read first
PROMPTS = ["Once upon a time", "Sluice", "a"]
pytestmark = pytest.mark.deadline(900)


@pytest.fixture
def server(world, monkeypatch) -> Server:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return world.serve(ENGINE / "policy.yaml")


def ask(server: Server, path: str, body: dict) -> tuple[int, dict]:
    client = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=START_SECONDS)
    client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse()
    return answer.status, json.loads(answer.read())


def complete(server: Server, prompt: str, tokens: int = 8) -> list[int]:
    status, answer = ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": tokens})
    assert status == 200, answer
    return answer["choices"][0]["tokens"]


def alone(prompt: str, tokens: int = 8) -> list[int]:
    """The same without any server."""
    sys.path.insert(0, str(ENGINE))
    import server as example
    from fastapi.testclient import TestClient

    client = TestClient(example.make_app(example.make_model(layers=8, width=512, device="cpu")))
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens}).json()["choices"][0]["tokens"]


def engine(server: Server) -> dict:
    return server.status()["engines"][0]


def test_the_first_request_starts_it_and_its_answers_are_those_of_the_model_alone(server):
    assert engine(server)["state"] == "cold"
    with ThreadPoolExecutor(len(PROMPTS)) as clients:  # all wait for one start
        first = list(clients.map(lambda prompt: complete(server, prompt), PROMPTS))
    assert engine(server)["starts"] == 1
    assert first[0] == alone(PROMPTS[0])
    os.kill(engine(server)["pid"], signal.SIGKILL)
    eventually(lambda: engine(server)["ends"] == 1, "its end is seen")
    assert [complete(server, prompt) for prompt in PROMPTS] == first
    assert engine(server)["starts"] == 2


def test_tokens_of_a_stream_are_those_of_the_whole_answer(server):
    whole = complete(server, PROMPTS[0])
    client = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=START_SECONDS)
    client.request("POST", "/v1/completions", json.dumps({"prompt": PROMPTS[0], "max_tokens": 8, "stream": True}),
                   {"Content-Type": "application/json"})
    events = [line.removeprefix(b"data: ") for line in client.getresponse().read().split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    assert [json.loads(event)["choices"][0]["token"] for event in events] == whole


def test_what_the_engine_refuses_the_client_hears_in_the_engines_words(server):
    status, answer = ask(server, "/v1/completions", {"prompt": ""})
    assert status == 422
    assert "at least 1 character" in answer["detail"][0]["msg"]
