"""The three phases: training alone, serving alone, and both on one pool."""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from demonstration.processes import Failed, Stage

EXAMPLES = Path(__file__).resolve().parent.parent
FEWEST_STEPS = 12
WARM_STEPS = 2  # a training job's first steps, which do not count: libraries set themselves up
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5  # between two looks at the pool


@dataclass(frozen=True)
class Setting:
    """What differs between a machine with a GPU and one without."""

    backend: str
    device: str  # of the training script
    policy: Path
    rates: dict[str, float]  # requests per second while the load is on
    tolerance: float  # of an answer's elements
    loss_tolerance: float  # relative, of the loss after the same steps in other slices


SETTINGS = {
    "host": Setting("host", "cpu", EXAMPLES / "policies" / "policy-host.yaml", {"minilm": 4.0, "silero_vad": 2.0},
                    tolerance=1e-4, loss_tolerance=1e-4),
    # Convolutions run in TF32 there, and training in bfloat16.
    "cuda": Setting("cuda", "cuda", EXAMPLES / "policies" / "policy-cuda.yaml", {"minilm": 20.0, "silero_vad": 5.0},
                    tolerance=1e-2, loss_tolerance=1e-2),
}


@dataclass
class Training:
    """What a training job's log says."""

    lines: list[dict]

    @property
    def final(self) -> dict:
        return self.lines[-1]

    @property
    def steps(self) -> int:
        return self.final["step"]

    @property
    def samples_per_s(self) -> float:
        """Over all steps but the first ones."""
        first, last = self.lines[WARM_STEPS - 1], self.final
        return (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])

    @property
    def step_seconds(self) -> float:
        first, last = self.lines[WARM_STEPS - 1], self.final
        return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])

    @property
    def slices(self) -> list[int]:
        """Micro-batches into which each step was cut."""
        commits = [line["commits"] for line in self.lines if not line.get("final")]
        return [b - a for a, b in zip([0, *commits], commits)]


@dataclass
class Together:
    training: Training
    load: dict  # the summary of load.py
    status: dict  # of the pool and the server, at the end
    looks: list[dict] = field(default_factory=list)  # the pool, whenever it was seen changed


def pool_memory(policy: Path) -> str:
    """The pool's size in a policy, for the phase that has no server to create it."""
    found = re.search(r"^\s*memory:\s*([^\s#]+)", policy.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise Failed(f"{policy} does not say how large the pool is")
    return found.group(1)


def read_log(file: Path) -> list[dict]:
    """The whole lines of a log that may still be written."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def training_command(stage: Stage, setting: Setting, log: Path, seed: int, *more: object) -> list:
    log.unlink(missing_ok=True)  # of an earlier demonstration
    return [stage.sluice, "run", "--backend", setting.backend, "--memory", pool_memory(setting.policy), "--name",
            "charlm", "--require-pool", "--", sys.executable, EXAMPLES / "train_charlm.py", "--device", setting.device,
            "--seed", seed, "--log", log, "--log-interval", 0, *more]


def load_command(setting: Setting, url: str, seed: int, seconds: float, on: float, off: float, log: Path) -> list:
    rates = [word for model, rate in setting.rates.items() for word in ("--rate", f"{model}={rate}")]
    return [sys.executable, EXAMPLES / "load.py", "--url", url, "--requests",
            EXAMPLES / "model_repository" / ".requests", *rates, "--seed", seed, "--seconds", seconds, "--on", on,
            "--off", off, "--tolerance", setting.tolerance, "--log", log]


def training_alone(stage: Stage, setting: Setting, seed: int, seconds: float) -> Training:
    log = stage.folder / "steps.jsonl"
    process = stage.start("training", training_command(stage, setting, log, seed, "--seconds", seconds, "--min-steps",
                                                       FEWEST_STEPS))
    stage.wait(process, 600)
    return Training(read_log(log))


def serving_alone(stage: Stage, setting: Setting, seed: int, port: int, seconds: float, on: float, off: float) -> dict:
    """The load's summary. It has the seed, the rates and the phases that it has beside training."""
    url = stage.serve(setting.policy, port)
    load = stage.start("load", load_command(setting, url, seed, seconds, on, off, stage.folder / "requests.jsonl"),
                       captured=True)
    return json.loads(stage.output(load, seconds + 120))


def together(stage: Stage, setting: Setting, seed: int, port: int, alone: Training, on: float, off: float,
             show: Callable[[dict], None]) -> Together:
    """As many steps of training as it did alone, under the load from the steps that count to the end."""
    url = stage.serve(setting.policy, port)
    log = stage.folder / "steps.jsonl"
    training = stage.start("training", training_command(stage, setting, log, seed, "--steps", alone.steps))

    limit = 120 + 20 * alone.final["seconds"]
    deadline = time.monotonic() + limit
    load, looks, looked, started = None, [], 0.0, 0.0
    while training.poll() is None:
        now = time.monotonic()
        if now > deadline:
            raise stage.failure(training, f"did not end within {limit:.0f} s")
        lines = read_log(log)
        if load is None and len(lines) >= WARM_STEPS:
            load = stage.start("load", load_command(setting, url, seed, limit, on, off,
                                                    stage.folder / "requests.jsonl"), captured=True)
            started = now
        if load is not None and now - looked >= LOOK_SECONDS:
            looked = now
            seen = look(stage.status(), lines)
            if not looks or any(looks[-1][name] != value for name, value in seen.items()):
                looks.append({"seconds": now - started, **seen})
                show(looks[-1])
        time.sleep(POLL_SECONDS)
    stage.wait(training, 1)
    if load is None:
        raise Failed(f"training ended before its step {WARM_STEPS} was seen; give the demonstration more --seconds")
    load.terminate()
    return Together(Training(read_log(log)), json.loads(stage.output(load, 120)), stage.status(), looks)


def look(status: dict, lines: list[dict]) -> dict:
    """Who holds how much right now, and how training fares."""
    pool = status["pool"]
    return {"training": pool["training_bytes"], "serving": pool["serving_bytes"],
            "free": pool["free_bytes"] + pool["dirty_bytes"],
            **{name: lines[-1][name] for name in ("micro_batch", "discards")}}
