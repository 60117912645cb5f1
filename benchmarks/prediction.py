"""How far the scheduler's predictions are off: the share of requests in time that it predicts while they come, against the share
that is, in the simulator, which runs the scheduler's own code.

A cell is a trace, a load (the service's share of the time, at the mean rate) and a latency in services. One model of 1 GiB, exponential
services, the first tenth left out; its reserve is none, so that its memory goes back. `--traces` names a folder with the Azure LLM
traces, which are played at their own pace with services that make the load.

With `--where server` the running server is asked instead (prediction_server.py): a cell is a model of two or four that share the host's
device, and how its requests come; and with `--on-miss reject` what becomes of those that are admitted. What the record has besides stays.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import tempfile
from pathlib import Path

from brokers import clear_up_on_sigterm
from prediction_server import rejecting_cells, server_cells
from records import ROOT, Cell, single, write

LOADS_PERCENT = (30, 50, 80)
LATENCIES = (3, 6, 12)
TARGET = {"error_points.value": "<= 3"}
RATE_PER_S = 2.0
LENGTH_S = 14400
GENERATED = {
    "poisson": "poisson:rate=2",
    "mmpp": "mmpp:rates=3.6/0.4,switches=0.02/0.02",
    "hawkes": "hawkes:rate=2,branching=0.5,decay=0.5",
    "lognormal": "lognormal:rate=2,scv=4",
    "diurnal": "diurnal:rate=2,swing=0.5,period=7200",
}
#: Requests and seconds of either, by which a service makes a load.
FILES = {"azure conversation": ("AzureLLMInferenceTrace_conv.csv", 19366 / 3501.7),
         "azure code": ("AzureLLMInferenceTrace_code.csv", 8819 / 3435.9)}


def simulate(preset: str, trace: str, service_s: float, latency_s: float, skip_s: float) -> dict:
    """The figures of all requests under the scheduler."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.csv"
        done = subprocess.run(
            [ROOT / "build" / preset / "bin" / "sluice", "simulate", "--trace", trace, "--policy", "ours:0B", "--length", f"{LENGTH_S}s",
             "--skip", f"{skip_s:.0f}s", "--service", f"{service_s * 1e6:.0f}us", "--service-scv", "1", "--latency",
             f"{latency_s * 1e6:.0f}us", "--percentile", "95%", "--attainment", "95%", "--machine", "h200", "--records",
             ROOT / "benchmarks" / "results", "--csv", figures],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr.strip())
        with figures.open() as file:
            return next(row for row in csv.DictReader(file) if row["model"] == "all")


def cell(preset: str, name: str, trace: str, rate: float, skip_s: float, load: int, latency: int) -> Cell:
    service_s = load / 100 / rate
    seen = simulate(preset, trace, service_s, latency * service_s, skip_s)
    in_time, predicted = float(seen["in_time"]), float(seen["predicted_in_time"])
    return Cell({"where": "simulator", "trace": name, "load_percent": load, "latency_services": latency},
                {"error_points": single(100 * abs(predicted - in_time), "the share in time, same run"),
                 "in_time_percent": single(100 * in_time), "predicted_percent": single(100 * predicted),
                 "released_percent": single(100 * float(seen["released_share"]))}, TARGET)


def within_bounds(cells: list[dict]) -> list[str]:
    notes = []
    for where, points, wanted in (("simulator", 3, "90 % of them"), ("server", 6, "all")):
        those = [each["met"]["error_points.value"] for each in cells if each["params"]["where"] == where and "error_points.value" in each["met"]]
        if those:
            notes.append(f"{where}: {sum(those)} of {len(those)} cells within {points} points; {wanted} were wanted")
    return notes


def simulated(preset: str, traces: Path | None) -> list[Cell]:
    sources = [(name, trace, RATE_PER_S, LENGTH_S / 10) for name, trace in GENERATED.items()]
    if traces:
        sources += [(name, str(traces / file), rate, 350.0) for name, (file, rate) in FILES.items()]
    wanted = [(*source, load, latency) for source in sources for load in LOADS_PERCENT for latency in LATENCIES]
    cells = []
    for each in wanted:
        cells.append(cell(preset, *each))
        print(f"{len(cells)} of {len(wanted)}: {each[0]}, load {each[4]} %, {each[5]} services", flush=True)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=("simulator", "server"), default="simulator")
    parser.add_argument("--traces", type=Path, help="folder with the Azure LLM traces, of the simulator")
    parser.add_argument("--on-miss", choices=("queue", "reject"), default="queue", help="of the server's models")
    parser.add_argument("--seeds", type=int, default=5, help="runs of the server for each cell")
    parser.add_argument("--before", type=float, default=30.0, help="seconds of each that do not count")
    parser.add_argument("--length", type=float, default=120.0, help="seconds of each that do")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    if args.where == "simulator":
        cells = simulated(args.preset, args.traces)
    else:
        of_server = rejecting_cells if args.on_miss == "reject" else server_cells
        cells = list(of_server(args.preset, args.seeds, args.before, args.length))
    write("prediction", cells, accumulate=True, summary=within_bounds)


if __name__ == "__main__":
    main()
