"""What placing models over devices by attainment takes, in processor time of one core, and what it gains in the simulator.

A cell is a number of models and devices and a load of these: models of 1 to 8 GiB, requests as a Poisson process that go to them by Zipf's
distribution with exponent 1, exponential services of 50 ms, 400 ms to answer; the devices have a fifth and 8 GiB each beyond what all models
need. A trace of 400 000 requests is placed as if it were known, and then played to each placement with all models warm.
"""

from __future__ import annotations

import argparse
import json
import subprocess

from records import ROOT, Cell, single, write

#: Models and devices.
SIZES = ((20, 4), (100, 8), (300, 16))
LOADS = (0.5, 0.7, 0.9)
REQUESTS = 400_000
RULES = ("attainment", "round-robin", "first-fit", "work")


def cell(preset: str, models: int, devices: int, load: float) -> Cell:
    done = subprocess.run([ROOT / "build" / preset / "bin" / "sluice-bench-scheduler-scale", "--part", "placement", "--models", str(models), "--devices",
                           str(devices), "--utilisation", str(load), "--requests", str(REQUESTS)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    said = json.loads(done.stdout)
    chosen = said["attainment"]
    others = {f"{rule.replace('-', '_')}_in_time_percent": single(said[rule]["in_time_percent"]) for rule in RULES[1:]}
    best = max(said[rule]["in_time_percent"] for rule in RULES[1:])
    return Cell({"models": models, "devices": devices, "load": load},
                {"placement_s": single(chosen["placement_s"]), "in_time_percent": single(chosen["in_time_percent"]),
                 "predicted_percent": single(chosen["predicted_percent"]), **others,
                 "gain_percent": single(chosen["in_time_percent"] - best), "replicas_ratio": single(chosen["replicas"] / models),
                 "left_out_percent": single(100 * chosen["left_out"] / models)},
                {"gain_percent.value": ">= 0"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    cells = []
    for models, devices in SIZES:
        for load in LOADS:
            cells.append(cell(args.preset, models, devices, load))
            print(f"{models} models on {devices} devices at a load of {load}", flush=True)
    write("placement", cells)


if __name__ == "__main__":
    main()
