"""What the benchmarks that ask a server share: models in a repository, and `sluice serve` until it listens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import overhead_models  # noqa: F401  it also finds the examples

from demonstration.processes import Failed

PATIENCE_S = 120.0
#: Of tensors by name: the type and the dimensions, as a configuration says them.
Tensors = dict[str, tuple[str, Sequence[int]]]


def add_model(repository: Path, name: str, module, inputs: Tensors, outputs: Tensors, max_batch: int = 0) -> None:
    """Writes the files of a model: a module that is scripted, or has been traced already."""
    import torch

    folder = repository / name
    (folder / "1").mkdir(parents=True)
    script = module if isinstance(module, torch.jit.ScriptModule) else torch.jit.script(module)
    script.save(str(folder / "1" / "model.pt"))
    lines = [f'name: "{name}"', 'platform: "pytorch_libtorch"', f"max_batch_size: {max_batch}"]
    for key, tensors in (("input", inputs), ("output", outputs)):
        for tensor, (kind, dims) in tensors.items():
            lines.append(f'{key} {{ name: "{tensor}" data_type: {kind} dims: [ {", ".join(map(str, dims))} ] }}')
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def add_rounds_models(repository: Path, *names: str) -> float:
    """Models that take as long as they are told, `n` rounds; returns what a round takes here, in milliseconds."""
    import torch

    torch.set_num_threads(1)

    class Rounds(torch.nn.Module):
        """So many products of a matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.eye(96))

        def forward(self, n: int) -> torch.Tensor:
            product = self.matrix
            for _ in range(n):
                product = product @ self.matrix
            return product.sum().reshape(1)

    scripted, rounds, times = torch.jit.script(Rounds()), 500, []
    for name in names:
        add_model(repository, name, scripted, {"n": ("TYPE_INT64", [1])}, {"y": ("TYPE_FP32", [1])})
    with torch.inference_mode():
        for _ in range(20):
            began = time.monotonic()
            scripted(rounds)
            times.append(time.monotonic() - began)
    return 1e3 * statistics.median(times[5:]) / rounds


class Server:
    """One `sluice serve`, with its log if there is a file for it; `listen` waits until it can be asked."""

    def __init__(self, program: Path, policy: Path, environment: dict[str, str], log: Path | None = None,
                 options: Sequence[str] = ()) -> None:
        self._log = log
        with contextlib.ExitStack() as closed:
            errors = closed.enter_context(log.open("wb")) if log else None
            self.process = subprocess.Popen([program, "serve", "--policy", policy, "--port", "0", *options],
                                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment,
                                            text=True)
        self.address = ("", 0)

    def listen(self) -> Server:
        """Raises Failed if it ends instead."""
        line = self.process.stdout.readline()
        if not (found := re.fullmatch(r"listening on http://(.*):(\d+)\n", line)):
            raise Failed(f"a server has ended with {self.process.wait()}\n{self.log()}".rstrip())
        self.address = (found[1], int(found[2]))
        return self

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8") if self._log else ""

    def request(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen("http://{}:{}{}".format(*self.address, path), data=data, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def status(self) -> dict:
        """What the server says of itself."""
        return self.request("/v2/sluice/status")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


def environment_of(runtime: Path, **more: str) -> dict[str, str]:
    """Of programs that find each other in that folder."""
    return {**os.environ, "SLUICE_RUNTIME_DIR": str(runtime), **more}
