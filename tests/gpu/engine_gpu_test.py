"""The example's engine on a GPU, FastAPI and transformers as they are: parked when it is idle, woken by a request, the same answers."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

from serving import Server, World  # noqa: E402

ENGINE = Path(__file__).parents[2] / "examples" / "engine" / "server.py"
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "20"))
SECONDS = 280.0
MIB = 1 << 20
pytestmark = pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="FastAPI is not installed")


@pytest.fixture
def world(sluice, tmp_path):
    made = World(sluice, tmp_path)
    yield made
    made.end()


def tokens(server: Server) -> list[int]:
    asked = urllib.request.Request(server.url + "/v1/completions", json.dumps({"prompt": "Once upon a time", "max_tokens": 32}).encode(),
                                   {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        return json.load(answer)["choices"][0]["tokens"]


def await_parked(server: Server) -> dict:
    """With next to nothing left: its last chunks are the pool's a moment after it has let them go."""
    until = time.monotonic() + SECONDS
    while (seen := server.status()["engines"][0])["state"] != "parked" or 10 * seen["resident_bytes"] > seen["parked_bytes"] + seen["resident_bytes"]:
        assert time.monotonic() < until, seen
        time.sleep(0.01)
    return seen


@pytest.mark.deadline(590)
def test_answers_are_the_same_before_and_after_many_parks(world):
    path = world.folder / "policy.yaml"
    path.write_text(f"""version: 1
server: {{request_timeout: 280s}}
pool: {{backend: cuda, memory: 4GiB}}
host_copies: {{memory: 4GiB}}
scheduler: {{tick: 20ms}}
models:
  - name: llama
    slo: {{latency: 5s}}
    warm: {{mode: fixed, max_idle: 0s}}
    engine:
      command: [{sys.executable}, {ENGINE}, --port, "{{port}}", --width, "1024"]
      ready: /health
      routes: [/v1/*]
""", encoding="utf-8")
    server = world.serve(path)
    first = tokens(server)
    wakes = []
    for park in range(1, PARKS + 1):
        seen = await_parked(server)
        assert seen["parks"] >= park
        assert seen["parked_bytes"] > 256 * MIB
        assert tokens(server) == first
        wakes.append(server.status()["engines"][0]["last_wake_ms"])
    assert server.status()["engines"][0]["starts"] == 1
    print(f"{PARKS} parks of {seen['parked_bytes'] / MIB:.0f} MiB, back within {sorted(wakes)[len(wakes) // 2]:.0f} ms")
