"""`sluice serve` for tests: a policy, a repository of small models, and servers that are spoken to over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import torch
from patience import PATIENCE_SECONDS
from server_models import ModelRepository

class Server:
    """One `sluice serve`, up or ended."""

    def __init__(self, program: Path, policy: Path, log: Path, *arguments: str, wrapper: list[str] | None = None) -> None:
        self.log_file = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*(wrapper or []), program, "serve", "--policy", policy, "--port", "0", "--threads", "1", *arguments],
                stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL)

    def wait_until_listening(self) -> Server:
        line = self.process.stdout.readline().decode()
        match = re.fullmatch(r"listening on (https?://127\.0\.0\.1:\d+)\n", line)
        assert match, f"{line!r}; exit code {self.process.poll()}; log:\n{self.log()}"
        self.url = match[1]
        return self

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def request(self, path: str, body: bytes | None = None) -> tuple[int, dict]:
        """Status and JSON of one request; GET without a body."""
        status, _, answer = self.request_with_headers(path, body)
        return status, answer

    def request_with_headers(self, path: str, body: bytes | None = None) -> tuple[int, dict, dict]:
        try:
            with urllib.request.urlopen(self.url + path, data=body, timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as failure:
            return failure.code, failure.headers, json.load(failure)

    def infer(self, model: str, inputs: list[dict], **more) -> tuple[int, dict]:
        return self.request(f"/v2/models/{model}/infer", json.dumps({"inputs": inputs, **more}).encode())

    def outputs(self, model: str, inputs: list[dict], **more) -> list[torch.Tensor]:
        """The answer's tensors; fails on any status but 200."""
        status, answer = self.infer(model, inputs, **more)
        assert status == 200, answer
        types = {"FP32": torch.float32, "INT64": torch.int64}
        return [torch.tensor(each["data"], dtype=types[each["datatype"]]).reshape(each["shape"])
                for each in answer["outputs"]]

    def status(self) -> dict:
        return self.request("/v2/sluice/status")[1]

    def executor(self) -> int:
        """Process id of what computes for it at the moment."""
        return self.status()["executor"]["pid"]

    def model(self, name: str) -> dict:
        return next(each for each in self.status()["models"] if each["name"] == name)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)


def floats(name: str, value: torch.Tensor) -> dict:
    return {"name": name, "datatype": "FP32", "shape": list(value.shape), "data": value.flatten().tolist()}


def integer(name: str, value: int) -> dict:
    return {"name": name, "datatype": "INT64", "shape": [1], "data": [value]}


@contextlib.contextmanager
def load_without_end(server: Server, rounds: int = 200):
    """Several clients, each with a request in flight, so that the server is never idle."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                assert int(server.outputs("slow", [integer("n", rounds)])[0]) == rounds
        except BaseException as failure:  # noqa: BLE001  told by the test's own thread
            failures.append(failure)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert not failures


class World:
    """A model repository, a policy and the servers started with them."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.models = ModelRepository(folder / "models")
        self.servers: list[Server] = []

    def policy(self, *models: str, memory: str = "64MiB", idle: str = "10m", more: str = "",
               training: str = "", server: str = "") -> Path:
        """A policy that serves `models`, each released after `idle` without a request; `server` has keys of that section."""
        lines = ["version: 1", f"server: {{{server + ', ' if server else ''}model_repository: {self.models.root}}}",
                 f"pool: {{backend: host, memory: {memory}}}", f"training: {{{training}}}",
                 "scheduler: {tick: 20ms}", "models:"]
        lines += [f"  - {{name: {name}, slo: {{latency: 500ms}}, warm: {{mode: fixed, max_idle: {idle}}}{more}}}"
                  for name in models]
        path = self.folder / "policy.yaml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def start(self, policy: Path, *arguments: str) -> Server:
        server = Server(self.program, policy, self.folder / f"server-{len(self.servers)}.log", *arguments)
        self.servers.append(server)
        return server

    def serve(self, policy: Path, *arguments: str) -> Server:
        return self.start(policy, *arguments).wait_until_listening()

    def refused(self, policy: Path, *arguments: str) -> tuple[int, str]:
        """Exit code and message of a server that does not come up."""
        server = self.start(policy, *arguments)
        code = server.process.wait(PATIENCE_SECONDS)
        assert server.process.stdout.read() == b""
        return code, server.log()

    def status(self) -> dict:
        answer = subprocess.run([self.program, "status", "--json"], capture_output=True, check=True)
        return json.loads(answer.stdout)

    def pool(self) -> dict:
        return self.status()["pool"]

    def job(self, name: str) -> dict | None:
        """What the status says of the training job of that name, once it has joined."""
        return next((each for each in self.status()["clients"] if each["name"] == name), None)

    def end(self) -> None:
        for server in self.servers:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()
            server.process.stdout.close()
