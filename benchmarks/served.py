"""A server of TorchScript models for a benchmark, and what is asked of it over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from brokers import end_broker
from records import ROOT

PATIENCE_S = 120.0


class Failed(Exception):
    """Something that the benchmark stands on did not happen."""


def add_model(repository: Path, name: str, module, given: str, answer: str, batch: int = 0) -> None:
    """Writes a TorchScript module and its configuration; `given` and `answer` are what stands in `input` and `output`."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    module.save(str(folder / "1" / "model.pt"))
    (folder / "config.pbtxt").write_text(
        f'name: "{name}"\nplatform: "pytorch_libtorch"\nmax_batch_size: {batch}\n'
        f"input {{ {given} }}\noutput {{ {answer} }}\n", encoding="utf-8")


@contextlib.contextmanager
def serving(folder: Path, policy: str, *, ends_broker: bool = True, threads: int = 1) -> Iterator[tuple[str, int]]:
    """Serves what the text of a policy says, with the runtime folder `folder`/run; the address. The log is `folder`/server.log."""
    file = folder / "policy.yaml"
    file.write_text(policy, encoding="utf-8")
    environment = {"SLUICE_LOG": "warn", **os.environ, "SLUICE_RUNTIME_DIR": str(folder / "run")}
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [ROOT / "build" / "release" / "bin" / "sluice", "serve", "--policy", file, "--port", "0", "--threads", str(threads)],
            stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
    try:
        if not (found := re.fullmatch(r"listening on http://(.*):(\d+)\n", process.stdout.readline())):
            raise Failed(f"the server has ended with {process.wait()}: "
                         f"{(folder / 'server.log').read_text(encoding='utf-8')[-2000:]}")
        yield found[1], int(found[2])
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()
        if ends_broker:
            with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):  # it goes by itself when nobody needs it
                end_broker(folder / "run")


class Client:
    """One connection that stays open."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """The answer's text. Raises Failed for any but 200."""
        self._connection.request("GET" if body is None else "POST", path, body)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise Failed(f"{path} was answered {answer.status}: {text[:300]!r}")
        return text

    def status(self) -> dict:
        return json.loads(self.ask("/v2/sluice/status"))
