"""A server of a large warm model is killed: how long until its successor answers the first request.

Times count from the successor's exec. The baseline, in the same run, is a server of a model of a few KiB that is killed and
started again in the same way: what programs, libtorch and the device's context take to start. The model's answers are held
against those that the first server gave, and these against plain PyTorch on the CPU.

After the last restart requests go on while the weights come to the host between them, then the model goes cold, and one
more request has it loaded from there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from brokers import clear_up_on_sigterm, end_broker
from endpoint import PATIENCE_S, Server, add_model, environment_of
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed

PROGRAM = ROOT / "build" / "release" / "bin" / "sluice"
GIB = 2**30
NUMBERS = 16
#: So long without a request, and a model is cold.
IDLE_S = 4
PROMISE_MS = 3000


class Layers(torch.nn.Module):
    """Square layers without a bias, each with weights of its own; a few numbers in, a few out."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = torch.nn.ModuleList(
            torch.nn.utils.skip_init(torch.nn.Linear, width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.repeat(1, self.width // x.size(1))
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y[:, :16]


def fill(model: Layers) -> None:
    """Random numbers from seeds, the layers at once; of a size that neither dies out nor saturates."""
    bound = (3.0 / model.width) ** 0.5

    def one(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        model.layers[number].weight.data.uniform_(-bound, bound, generator=generator)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, range(len(model.layers))))


def add_layers(repository: Path, name: str, count: int, width: int, question: torch.Tensor) -> torch.Tensor:
    """Writes the model's file and configuration; its answer by plain PyTorch."""
    model = Layers(count, width).eval()
    with torch.inference_mode():
        fill(model)
        answer = model(question)
    add_model(repository, name, model, {"x": ("TYPE_FP32", [NUMBERS])}, {"y": ("TYPE_FP32", [NUMBERS])}, max_batch=8)
    return answer


class Started(Server):
    """A server, and what its clients want to know."""

    def __init__(self, policy: Path, log: Path, environment: dict[str, str]) -> None:
        self.began = time.monotonic()
        super().__init__(PROGRAM, policy, environment, log)
        self.listen()
        self.ready_ms = self.since_ms()

    def since_ms(self) -> float:
        return 1e3 * (time.monotonic() - self.began)

    def ask(self, model: str, question: torch.Tensor) -> torch.Tensor:
        given = {"name": "x", "datatype": "FP32", "shape": list(question.shape), "data": question.flatten().tolist()}
        answer = self.request(f"/v2/models/{model}/infer", {"inputs": [given]})["outputs"][0]
        return torch.tensor(answer["data"]).reshape(answer["shape"])

    def model(self) -> dict:
        return self.status()["models"][0]

    def wait_until(self, what: str, holds) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds(self.model()):
            if time.monotonic() > deadline:
                raise Failed(f"not within {PATIENCE_S:.0f} s: {what}\n{self.log()}")
            time.sleep(0.01)


@dataclass
class Restarts:
    """What was seen of a model's servers; milliseconds from their exec."""

    first_start_ms: float = 0.0
    first_cold_ms: float = 0.0
    ready_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    copied_bytes: int = 0
    read_bytes: int = 0
    wrong: int = 0


class World:
    """A repository and the servers of its models, one after the other, in one pool."""

    def __init__(self, folder: Path, backend: str, pool_bytes: int) -> None:
        self.repository = folder / "models"
        self._folder, self._backend, self._pool_bytes = folder, backend, pool_bytes
        self._runtime = folder / "run"
        self._runtime.mkdir(mode=0o700)
        self._environment = environment_of(self._runtime)
        self._count = 0
        self._server: Started | None = None

    def serve(self, model: str, more: str = "") -> Started:
        """`more` are keys of the policy's section `server`, each behind a comma."""
        policy = self._folder / f"{model}.yaml"
        policy.write_text(
            f"version: 1\nserver: {{model_repository: {self.repository}{more}}}\n"
            f"pool: {{backend: {self._backend}, memory: {self._pool_bytes // 2**20}MiB}}\n"
            f"models:\n  - {{name: {model}, slo: {{latency: 1s}}, warm: {{mode: fixed, max_idle: {IDLE_S}s}}}}\n", encoding="utf-8")
        self._count += 1
        self._server = Started(policy, self._folder / f"server-{self._count}.log", self._environment)
        return self._server

    def end(self) -> None:
        if self._server and self._server.process.poll() is None:
            self._server.kill()
        with contextlib.suppress(OSError):
            end_broker(self._runtime)


@contextlib.contextmanager
def a_world(backend: str, pool_bytes: int) -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        world = World(Path(folder), backend, pool_bytes)
        try:
            yield world
        finally:
            world.end()


def restart(world: World, name: str, repeats: int, question: torch.Tensor,
            plain: torch.Tensor) -> tuple[Restarts, Started, torch.Tensor]:
    """Kills a server with the model warm, so often; what was seen, the last server, and the answer."""
    seen = Restarts()
    server = world.serve(name)
    seen.first_start_ms = server.ready_ms
    began = time.monotonic()
    right = server.ask(name, question)
    seen.first_cold_ms = 1e3 * (time.monotonic() - began)
    if not torch.allclose(right, plain, rtol=1e-2, atol=1e-4):
        raise Failed(f"the answer of '{name}' is not that of plain PyTorch: {right} {plain}")
    for _ in range(repeats):
        server.wait_until("the model would outlive its server", lambda model: model["outlives_server"])
        server.kill()
        server = world.serve(name)
        answer = server.ask(name, question)
        seen.answer_ms.append(server.since_ms())
        seen.ready_ms.append(server.ready_ms)
        taken = re.search(r"took over a warm model model=\S+ bytes=\d+ copied_bytes=(\d+)", server.log())
        if not taken:
            raise Failed(f"a server took nothing over:\n{server.log()}")
        seen.copied_bytes += int(taken[1]) + sum(each["bytes"] for each in server.status()["handovers"])
        seen.read_bytes = max(seen.read_bytes, int(re.search(r"took over .* read_bytes=(\d+)", server.log())[1]))
        seen.wrong += not torch.equal(answer, right)
    return seen, server, right


def afterwards(server: Started, name: str, question: torch.Tensor, right: torch.Tensor) -> tuple[dict, int]:
    """Requests while the image is made and when it is complete, and a cold start from it."""
    meanwhile, later, wrong = [], [], 0

    def ask(into: list[float]) -> None:
        nonlocal wrong
        began = time.monotonic()
        wrong += not torch.equal(server.ask(name, question), right)
        into.append(1e6 * (time.monotonic() - began))

    began = time.monotonic()
    while (model := server.model())["image_bytes"] < model["bytes"]:
        ask(meanwhile)
        time.sleep(0.02)
        if time.monotonic() - began > PATIENCE_S:
            raise Failed("the image is not made")
    image_ms = 1e3 * (time.monotonic() - began)
    for _ in range(50):
        ask(later)
        time.sleep(0.02)
    server.wait_until("the model is cold", lambda model: model["state"] == "cold")
    cold: list[float] = []
    ask(cold)
    metrics = {"image_ms": single(image_ms), "answer_after_us": distribution(later), "cold_answer_ms": single(cold[0] / 1e3)}
    if meanwhile:
        metrics["answer_meanwhile_us"] = distribution(meanwhile)
    return metrics, wrong


def measure(backend: str, gib: float, repeats: int) -> Cell:
    width = 8192 if gib >= 4 else 2048
    count = round(gib * GIB / (4 * width * width))
    question = torch.linspace(-1, 1, NUMBERS).reshape(1, NUMBERS)
    with a_world(backend, int(gib * GIB * 1.05) + GIB // 2) as world:
        plain = add_layers(world.repository, "large", count, width, question)
        plain_small = add_layers(world.repository, "small", 2, 32, question)
        libraries, server, _ = restart(world, "small", repeats, question, plain_small)
        server.end()
        large, server, right = restart(world, "large", repeats, question, plain)
        metrics, wrong = afterwards(server, "large", question, right)
        server.end()
    added = statistics.median(large.answer_ms) - statistics.median(libraries.answer_ms)
    return Cell(
        {"gib": gib, "tensors": count, "backend": backend},
        {"first_answer_ms": distribution(large.answer_ms), "ready_ms": distribution(large.ready_ms),
         "libraries_first_answer_ms": distribution(libraries.answer_ms), "libraries_ready_ms": distribution(libraries.ready_ms),
         "added_ms": single(added, "a model of 8 KiB, same run, medians"),
         "whole_start_ms": single(large.first_start_ms), "whole_start_cold_answer_ms": single(large.first_cold_ms),
         "copied_bytes": single(large.copied_bytes), "read_bytes": single(large.read_bytes),
         "wrong": single(large.wrong + libraries.wrong + wrong), **metrics},
        {"first_answer_ms.max": f"<= {PROMISE_MS}", "copied_bytes.value": "<= 0", "wrong.value": "<= 0"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--gib", type=float, help="size of the weights (default 20 on a GPU, else 0.25)")
    parser.add_argument("--repeats", type=int, default=3, help="restarts of each model (default %(default)s)")
    options = parser.parse_args()
    clear_up_on_sigterm()
    gpu = options.backend == "cuda"
    write("warm_restart", [measure(options.backend, options.gib or (20.0 if gpu else 0.25), options.repeats)], gpus=int(gpu),
          notes=["first_answer_ms, ready_ms: from exec; libraries_*: the same of a server of a model of 8 KiB"])


if __name__ == "__main__":
    main()
