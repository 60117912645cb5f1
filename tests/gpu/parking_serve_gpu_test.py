"""A cold model of 20 GiB is served beside a job that keeps 60 GiB of a pool of 78: the job is parked for it, and learns the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

import serving  # noqa: E402
from patience import eventually  # noqa: E402
from server_models import SLOW  # noqa: E402
from serving import Server, World, integer  # noqa: E402

TRAINING = Path(__file__).with_name("parked_training.py")
GIB = 1 << 30
#: Of the pool, of the job beside its model, of the served model, in GiB.
POOL, KEEPS, MODEL = (int(size) for size in os.environ.get("SLUICE_TEST_COLD_GIB", "78 60 20").split())
STEPS = int(os.environ.get("SLUICE_TEST_COLD_STEPS", "12000"))
BLOCK = 1 << 20


class Large(torch.nn.Module):
    """Adds up all that it consists of, so that each byte counts."""

    def __init__(self, gib: int) -> None:
        super().__init__()
        block = torch.arange(BLOCK, dtype=torch.int32) * 2_654_435
        self.register_buffer("numbers", block.repeat(gib * GIB // (4 * BLOCK)).reshape(-1, BLOCK))
        self.numbers += torch.arange(len(self.numbers), dtype=torch.int32)[:, None]

    def forward(self, n: int) -> torch.Tensor:
        return self.numbers.sum(dtype=torch.int64).reshape(1) + n


class LargeWorld(World):
    def policy(self, *models: str) -> Path:
        path = super().policy(*models, training="resident_window: 10m, stay: 2", server="request_timeout: 5m", idle="2s")
        text = path.read_text(encoding="utf-8")
        text = text.replace("pool: {backend: host, memory: 64MiB}", f"pool: {{backend: cuda, memory: {POOL}GiB}}\nhost_copies: {{memory: {KEEPS + 2}GiB}}")
        path.write_text(text, encoding="utf-8")
        return path


@pytest.fixture
def world(sluice, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "PATIENCE_SECONDS", 300.0)
    made = LargeWorld(sluice, tmp_path)
    yield made
    made.end()


def parking(world: World) -> dict:
    """What the status says of the job's; empty before it has joined."""
    return next((one["parking"] for one in world.status()["clients"] if one["kind"] == "training"), {})


def train(command: list, file: Path) -> subprocess.Popen:
    return subprocess.Popen([*map(str, command), sys.executable, str(TRAINING), "gpt", str(STEPS), str(file), "--fill", str(KEEPS - 0.25)],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def losses(job: subprocess.Popen, file: Path) -> list[float]:
    complaints = job.communicate(timeout=500)[1]
    assert job.returncode == 0, complaints[-4000:]
    return json.loads(file.read_text(encoding="utf-8"))["losses"]


def answer(server: Server, number: int) -> int:
    """As clients do, who come again when they are told to."""
    while True:
        status, headers, found = server.request_with_headers(
            "/v2/models/large/infer", json.dumps({"inputs": [integer("n", number)]}).encode())
        if status != 503 or "Retry-After" not in headers:
            assert status == 200, found
            return found["outputs"][0]["data"][0]
        time.sleep(int(headers["Retry-After"]))


@pytest.mark.deadline(590)
def test_a_cold_model_is_served_beside_a_job_that_keeps_most_of_the_pool(world, tmp_path):
    alone = train([], tmp_path / "alone.json")
    model = world.models.add("large", Large(MODEL), **SLOW)
    server = world.serve(world.policy("large"))
    wanted = model(7).item()
    del model
    assert losses(alone, tmp_path / "alone.json")
    job = train([world.program, "run", "--require-pool", "--"], tmp_path / "shared.json")
    try:
        eventually(lambda: (found := parking(world)) and found["parkable_bytes"] >= (KEEPS - 1) * GIB, "it can be parked")
        for _ in range(2):
            began = time.monotonic()
            assert answer(server, 7) == wanted
            of_job = parking(world)
            print(f"answered after {time.monotonic() - began:.1f} s, of the job {of_job['parked_bytes'] / GIB:.1f} GiB are away")
            eventually(lambda: parking(world)["parked_bytes"] == 0, "it is back")
        shared = losses(job, tmp_path / "shared.json")
    finally:
        job.kill()
        job.wait()
    assert of_job["parks"] >= 1
    assert shared == json.loads((tmp_path / "alone.json").read_text(encoding="utf-8"))["losses"]
