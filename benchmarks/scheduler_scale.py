"""What a tick of the scheduler takes with many models, and what the simulator takes for a request, in processor time of one core.

A cell of `models` is a number of models and a mean rate of each: requests come as a Poisson process and go to models by Zipf's
distribution with exponent 1; an hour passes first, then ticks of an hour are timed, one a second of the played time. A tick decides anew for the models
that need it, and sizes the reserve. A cell of `policy` plays a trace of four million requests to 1000 models.
"""

from __future__ import annotations

import argparse
import json
import subprocess

from records import ROOT, Cell, distribution, single, write

MODELS = (1_000, 3_000, 10_000, 30_000, 100_000)
#: Requests per second and model: a request every hundred, and every twenty seconds.
RATES = (0.01, 0.05)
#: Played to the simulator, and held against two million requests a second. The scheduler's own estimators come to what the simulator takes.
POLICIES = {"fixed:60s": True, "always": True, "ours": False}
TICK = {"tick_ms.value": "<= 1"}
RATE = {"requests_per_s.value": ">= 2000000"}
BYTES = {"bytes_per_model.value": "<= 200", "bytes_per_request.value": "<= 200"}


def run(preset: str, *options: object) -> dict:
    done = subprocess.run([ROOT / "build" / preset / "bin" / "sluice-bench-scheduler-scale", *map(str, options)],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return json.loads(done.stdout)


def ticks(preset: str, models: int, rate: float) -> Cell:
    said = run(preset, "--part", "ticks", "--models", models, "--rate-per-model", rate, "--warm-up-s", 3600, "--length-s", 3600)
    took = [us / 1000 for us in said["tick_us"]]
    mean = sum(took) / len(took)
    return Cell({"models": models, "rate_per_model": rate},
                {"tick_ms": single(mean), "one_tick_ms": distribution(took), "per_1000_models_us": single(1000 * 1000 * mean / models),
                 "decisions_per_tick": single(said["decisions_per_tick"]), "request_us": single(said["request_us"]),
                 "bytes_per_model": single(said["bytes_per_model"])},
                TICK if models <= 10_000 else {})


def simulator(preset: str, policy: str, is_its_own: bool) -> Cell:
    rate = run(preset, "--part", "simulator", "--policy", policy, "--models", 1000, "--requests", 4_000_000 if is_its_own else 400_000)
    memory = run(preset, "--part", "memory", "--policy", policy)
    return Cell({"policy": policy}, {"requests_per_s": single(rate["requests_per_s"]), **{name: single(memory[name]) for name in memory}},
                {**RATE, **BYTES} if is_its_own else {})


def linear(cells: list[dict]) -> list[str]:
    said = []
    for rate in RATES:
        each = [cell["metrics"]["per_1000_models_us"]["value"] for cell in cells if cell["params"].get("rate_per_model") == rate]
        if each:
            said.append(f"at {rate} requests/s a model, a tick takes {min(each)} to {max(each)} us for each 1000 models, of {MODELS[0]} to {MODELS[-1]}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    cells = []
    for rate in RATES:
        for models in MODELS:
            cells.append(ticks(args.preset, models, rate))
            print(f"{models} models, {rate} requests/s each", flush=True)
    for policy, is_its_own in POLICIES.items():
        cells.append(simulator(args.preset, policy, is_its_own))
        print(f"simulator, {policy}", flush=True)
    write("scheduler_scale", cells, summary=linear)


if __name__ == "__main__":
    main()
