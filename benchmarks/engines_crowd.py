"""Many engines in a pool in which few of them fit, beside training: `engines.py --crowd`.

Requests arrive by a Poisson process, each for an engine by Zipf's law (`engines.py --crowd`'s options say how many, how large, and how fast).
All engines are the example's, with the same weights, so that one prompt has one answer: each answer is compared with the one that a
process alone gives. Beside them a job trains; in the end it is repeated for as many steps without anybody beside it, and both must
have learned the same bits.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from brokers import end_broker
from endpoint import Server, environment_of
from records import ROOT, Cell, distribution, single

from demonstration.processes import Failed

SLUICE = ROOT / "build" / "release" / "bin" / "sluice"
MOUNTED = ROOT / "tests" / "system" / "mounted_engine.py"
PATIENCE_S = 300.0
GIB = 1 << 30
PROMPTS = [f"Once upon a time, number {number}" for number in range(8)]
MOST_AT_ONCE = 64
DEVICES = {"host": "cpu", "cuda": "cuda"}


@dataclass
class Answers:
    """What became of requests."""

    first_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def body_of(prompt: str) -> str:
    return json.dumps({"prompt": prompt, "max_tokens": 8})


def tokens_alone(options: argparse.Namespace, folder: Path) -> dict[str, list[int]]:
    """The answers of an engine that no server stands before."""
    process = subprocess.Popen([*map(str, command_of("alone", options)), "--port", str(port := free_port())],
                               env=environment_of(folder, SLUICE_LOG="warn"))
    try:
        until, found = time.monotonic() + PATIENCE_S, {}
        while len(found) < len(PROMPTS):
            prompt = PROMPTS[len(found)]
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/alone/v1/completions", body_of(prompt).encode(),
                                           {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                    found[prompt] = json.load(answer)["choices"][0]["tokens"]
            except OSError as why:
                if process.poll() is not None or time.monotonic() > until:
                    raise Failed(f"an engine by itself cannot be asked: {why}") from why
                time.sleep(0.1)
        return found
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def command_of(name: str, options: argparse.Namespace) -> list:
    return [sys.executable, MOUNTED, "--path", f"/{name}", "--layers", options.crowd_layers, "--width", options.width,
            "--device", DEVICES[options.backend]]


def policy_of(options: argparse.Namespace) -> str:
    lines = ["version: 1", "server: {request_timeout: 4m}", f"pool: {{backend: {options.backend}, memory: {options.crowd_pool}}}",
             f"host_copies: {{memory: {options.crowd_copies}}}", "models:"]
    for name in names_of(options):
        command = ", ".join(f"'{part}'" for part in (*command_of(name, options), "--port", "{port}"))
        lines.append(f"  - {{name: {name}, slo: {{latency: 10s}}, max_queue: 1000, engine: {{command: [{command}], ready: /{name}/health, "
                     f"routes: [/{name}/v1/*], start: on_demand, start_timeout: 10m}}}}")
    return "\n".join(lines) + "\n"


def names_of(options: argparse.Namespace) -> list[str]:
    return [f"engine{number}" for number in range(options.engines)]


def ask(server: Server, name: str, prompt: str, wanted: list[int], due: float, answers: Answers) -> None:
    """One request, at its time; what is wrong with its answer is counted."""
    time.sleep(max(0.0, due - time.monotonic()))
    client = http.client.HTTPConnection(*server.address, timeout=PATIENCE_S)
    try:
        client.request("POST", f"/{name}/v1/completions", body_of(prompt), {"Content-Type": "application/json"})
        answer = client.getresponse()
        text = answer.read().decode(errors="replace")
        took = 1000 * (time.monotonic() - due)
        with answers.lock:
            answers.first_ms.append(took)
            if answer.status != 200:
                answers.errors.append(f"{name}: {answer.status} {text[:300]}")
            elif json.loads(text)["choices"][0]["tokens"] != wanted:
                answers.wrong += 1
    except (OSError, http.client.HTTPException, ValueError) as why:
        with answers.lock:
            answers.errors.append(f"{name}: {why!r}")
    finally:
        client.close()


def arrivals_of(options: argparse.Namespace, run: int) -> list[tuple[float, str, str]]:
    dice = random.Random(f"crowd {run}")
    names = names_of(options)
    weights = [1 / (rank + 1) ** options.zipf for rank in range(len(names))]
    found, at = [], 0.0
    while (at := at + dice.expovariate(options.crowd_rate)) < options.seconds:
        found.append((at, dice.choices(names, weights)[0], dice.choice(PROMPTS)))
    return found


def train(options: argparse.Namespace, folder: Path, *, out: Path, until: Path | None = None, steps: int = 0) -> subprocess.Popen:
    ending = ["--until", until] if until else ["--steps", steps]
    model = [] if options.backend == "host" else ["--model", options.crowd_job, "--batch", 4, "--micro-batch", 4]
    command = [SLUICE, "run", "--backend", options.backend, "--runtime-dir", folder, "--memory", options.crowd_pool, "--host-memory",
               options.crowd_copies, "--require-pool", "--", sys.executable, ROOT / "benchmarks" / "exact_job.py", "--device",
               DEVICES[options.backend], "--out", out, *model, *ending]
    return subprocess.Popen([*map(str, command)], env=environment_of(folder, SLUICE_LOG="warn"), stdin=subprocess.DEVNULL)


def learned(job: subprocess.Popen, out: Path) -> dict:
    if job.wait(2 * PATIENCE_S) != 0:
        raise Failed(f"a job has ended with {job.returncode}")
    return json.loads(out.read_text(encoding="utf-8"))


def measure_crowd(options: argparse.Namespace) -> Cell:
    """Raises Failed."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        wanted = tokens_alone(options, runtime)
        (folder / "policy.yaml").write_text(policy_of(options), encoding="utf-8")
        server = Server(SLUICE, folder / "policy.yaml", environment_of(runtime, SLUICE_LOG="warn"), folder / "log").listen()
        answers, beside = Answers(), folder / "beside.json"
        try:
            starting = Answers()
            for name in names_of(options):
                ask(server, name, PROMPTS[0], wanted[PROMPTS[0]], 0.0, starting)
            if starting.errors or starting.wrong:
                raise Failed(f"engines do not start: {starting}\n{server.log()}")
            size = sum((each["resident_bytes"] or 0) + (each["parked_bytes"] or 0) for each in server.status()["engines"])
            parks = sum(each["parks"] for each in server.status()["engines"])
            job = train(options, runtime, out=beside, until=folder / "enough")
            began = time.monotonic()
            for run in range(options.runs):
                start = time.monotonic()
                with ThreadPoolExecutor(MOST_AT_ONCE) as clients:
                    for at, name, prompt in arrivals_of(options, run):
                        clients.submit(ask, server, name, prompt, wanted[prompt], start + at, answers)
            seconds = time.monotonic() - began
            (folder / "enough").touch()
            trained = learned(job, beside)
            parks = sum(each["parks"] for each in server.status()["engines"]) - parks
        finally:
            server.end()
        alone = learned(train(options, runtime, out=folder / "alone.json", steps=trained["steps"]), folder / "alone.json")
        end_broker(runtime)
    for error in answers.errors[:5]:
        print(error, file=sys.stderr)
    same = alone["digest"] == trained["digest"] and alone["losses"] == trained["losses"]
    return Cell({"part": "crowd", "engines": options.engines, "gib": round(size / GIB, 2), "pool": options.crowd_pool, "zipf": options.zipf,
                 "requests_per_s": options.crowd_rate, "runs": options.runs, "seconds": options.seconds},
                {"answer_ms": distribution(answers.first_ms), "server_errors": single(len(answers.errors)), "wrong": single(answers.wrong),
                 "parks": single(parks), "steps": single(trained["steps"]), "steps_per_s": single(trained["steps"] / seconds),
                 "bit_equal": single(int(same), "the same job alone, same run")},
                {"server_errors.value": "<= 0", "wrong.value": "<= 0", "bit_equal.value": ">= 1", "steps.value": ">= 1"})
