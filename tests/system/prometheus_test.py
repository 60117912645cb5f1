"""Prometheus, as Debian has it, and a server's metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import floats

X = torch.tensor([[1.0, -2.0, 0.5]])


@pytest.fixture(scope="module")
def programs() -> Path:
    script = Path(__file__).resolve().parents[1] / "prometheus.sh"
    found = subprocess.run([script], capture_output=True, text=True, timeout=PATIENCE_SECONDS * 4)
    if found.returncode != 0:
        pytest.skip(f"Prometheus is not to be had: {found.stderr.strip()}")
    return Path(found.stdout.strip())


def metrics_of(server) -> str:
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_SECONDS) as answer:
        return answer.read().decode()


def complaints(programs: Path, text: str) -> tuple[int, list[str]]:
    checked = subprocess.run([programs / "promtool", "check", "metrics"], input=text, capture_output=True, text=True,
                             timeout=PATIENCE_SECONDS)
    return checked.returncode, (checked.stdout + checked.stderr).splitlines()


def test_promtool_finds_nothing_but_tritons_own_names(programs, world):
    world.models.add("affine", Affine(padding_mib=8), **AFFINE)
    server = world.serve(world.policy("affine"))
    server.outputs("affine", [floats("x", X)])
    text = metrics_of(server)
    _, found = complaints(programs, text)
    print([e for e in found if not e.startswith("nv_")])
    assert all(each.startswith("nv_") for each in found), found
    # Triton's names end in _us, and its counters not in _total; our own are as Prometheus wants them.
    own = "".join(line + "\n" for line in text.splitlines() if not line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("nv_"))
    assert "sluice_pool_bytes" in own
    assert complaints(programs, own) == (0, [])


class Prometheus:
    """One that scrapes one server each second, and keeps what it has in a folder."""

    def __init__(self, programs: Path, folder: Path, target: str) -> None:
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        config = {"global": {"scrape_interval": "1s"},
                  "scrape_configs": [{"job_name": "sluice", "static_configs": [{"targets": [target]}]}]}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # YAML, too
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [programs / "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={self.address}"], stdout=self.log, stderr=subprocess.STDOUT)

    def value(self, query: str) -> float | None:
        assert self.process.poll() is None, Path(self.log.name).read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/query?query={urllib.parse.quote(query)}",
                                        timeout=PATIENCE_SECONDS) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:  # it is starting
            return None
        return float(result[0]["value"][1]) if result else None

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_) -> None:
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=PATIENCE_SECONDS)
        self.log.close()


def test_prometheus_scrapes_a_server(programs, world, tmp_path):
    world.models.add("affine", Affine(padding_mib=8), **AFFINE)
    server = world.serve(world.policy("affine"))
    with Prometheus(programs, tmp_path / "prometheus", server.url.removeprefix("http://")) as prometheus:
        eventually(lambda: prometheus.value('up{job="sluice"}') == 1, "a scrape that was understood")
        for _ in range(3):
            server.outputs("affine", [floats("x", X)])
        eventually(lambda: prometheus.value('nv_inference_request_success{model="affine"}') == 3, "the requests")
        assert prometheus.value("sum(sluice_pool_bytes)") == sum(
            world.pool()[owner] for owner in world.pool() if owner.endswith("_bytes") and owner in (
                "free_bytes", "training_bytes", "serving_bytes", "engine_bytes"))
        assert prometheus.value('sluice_model_state{model="affine",state="warm"}') == 1
        assert prometheus.value("scrape_samples_scraped") > 30
