"""What share of requests policies of keeping models answer in time, against the memory that they release to training meanwhile, in the
simulator: the scheduler's own code, also with parts of models that stay, every fixed keep-alive, Sirius, Serverless in the Wild, and what
foresight would do.

    ./benchmarks/run.sh pareto --traces FOLDER [--plot docs/figures/pareto.svg]

A cell is a trace, a number of models that share a device, and a promise: a latency and a percentile, which each model makes for itself.
So attainment is that of the model with the least. Models have 16 GiB, which the H200's records load in a third of a second, and
exponential services of 50 ms; a cold start misses the first latency, keeps the third one nearly always, and the second one mostly.
Where the scheduler has an attainment, the fixed keep-alives are compared at the same one: straight lines are drawn between two
timeouts that follow each other (ratio √2). `--traces` names a folder with the Azure LLM traces, played at their own pace.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from records import ROOT, Cell, single, write

#: By the number of models, so that there are as many requests.
LENGTH_S = {1: 864000, 8: 86400}
MODELS = (1, 8)
LATENCIES_MS = (300, 400, 600)
PERCENTILES = (90, 95, 99)
GENERATED = {
    "poisson": "poisson:rate={rate}",
    "mmpp": "mmpp:rates={high}/{low},switches=0.02/0.02",
    "hawkes": "hawkes:rate={rate},branching=0.5,decay=0.5",
    "lognormal": "lognormal:rate={rate},scv=4",
    "diurnal": "diurnal:rate={rate},swing=0.5,period=7200",
}
#: Requests a second of all models: alone a model has a gap of ten seconds between two, of eight the most and the least asked for three and twenty.
RATES = {1: 0.1, 8: 1.0}
FILES = {"azure conversation": "AzureLLMInferenceTrace_conv.csv", "azure code": "AzureLLMInferenceTrace_code.csv"}
#: Runs of a file, which is an hour long.
FILE_SEEDS = 8
FIXED_S = tuple(round(0.1 * 2 ** (step / 2), 3) for step in range(25))  # to 410 s
FIXED = ("cold", *(f"fixed:{timeout * 1000:.0f}ms" for timeout in FIXED_S), "always")
OTHERS = ("sirius", "wild")
BOUND = "clairvoyant"
OURS = ("ours", "partial")
#: Points of memory-time, and of requests, that are no difference.
ALIKE = 0.5
TARGETS = {f"{whose}{what}_points.value": f"{how}{ALIKE}" for whose in ("", "partial_") for what, how in (("margin", ">= -"), ("dominated", "<= "))}


@dataclass(frozen=True)
class Source:
    """How the simulator is told of a trace, and with how many seeds it is played."""

    options: tuple[str, ...]
    seeds: int


@dataclass(frozen=True)
class Point:
    """Percent of the least served model's requests in time, and of all models' memory-time released."""

    in_time: float
    released: float


def run(preset: str, source: Source, seed: int, models: int, latency_ms: int, percentile: int, policies: tuple[str, ...],
        memory: float = 1.0) -> list[dict]:
    """A line of the simulator's figures for each policy and model; `memory`: of the device, for that share of all models."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.csv"
        done = subprocess.run(
            [ROOT / "build" / preset / "bin" / "sluice", "simulate", *source.options, "--seed", str(seed), "--models", str(models), "--service", "50ms",
             "--service-scv", "1", "--size", "16GiB", "--memory", f"{16 * models * memory:.0f}GiB", "--latency", f"{latency_ms}ms",
             "--percentile", f"{percentile}%", "--attainment", "95%", "--machine", "h200", "--records", ROOT / "benchmarks" / "results", "--csv", figures,
             *(part for each in policies for part in ("--policy", each))],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr.strip())
        with figures.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))


def simulate(preset: str, source: Source, models: int, latency_ms: int, percentile: int, policies: tuple[str, ...]) -> dict[str, Point]:
    """Means over the seeds, of each model; a file's requests go to models, and take their time, by the seed."""
    rows = [row for seed in range(1, source.seeds + 1) for row in run(preset, source, seed, models, latency_ms, percentile, policies)]

    def mean(policy: str, model: str, column: str) -> float:
        return statistics.fmean(100 * float(row[column]) for row in rows if row["policy"] == policy and row["model"] == model)

    names = {row["model"] for row in rows} - {"all"}
    return {policy: Point(min(mean(policy, model, "in_time") for model in names), mean(policy, "all", "released_share"))
            for policy in policies}


def released_at(in_time: float, curve: list[Point]) -> float:
    """The most that a point of the curve releases with at least that attainment; the curve is drawn by straight lines."""
    best = max((each.released for each in curve if each.in_time >= in_time), default=0.0)
    for one, other in zip(curve, curve[1:], strict=False):
        if min(one.in_time, other.in_time) < in_time < max(one.in_time, other.in_time):
            share = (in_time - one.in_time) / (other.in_time - one.in_time)
            best = max(best, one.released + share * (other.released - one.released))
    return best


def compared(ours: Point, seen: dict[str, Point]) -> dict[str, float]:
    """What others release at that attainment, and by how many points of memory-time ours is before them."""
    fixed = released_at(ours.in_time, [seen[each] for each in FIXED])
    other = max((seen[each].released for each in OTHERS if seen[each].in_time >= ours.in_time), default=0.0)
    return {"fixed": fixed, "others": other, "margin": ours.released - min(0.95 * seen[BOUND].released, max(fixed, other)),
            "dominated": max(0.0, fixed - ours.released)}


def cell(params: dict, ours: Point, partial: Point, seen: dict[str, Point]) -> Cell:
    by_all = compared(ours, seen)
    by_parts = compared(partial, seen)
    return Cell(params,
                {"in_time_percent": single(ours.in_time), "released_percent": single(ours.released),
                 "fixed_percent": single(by_all["fixed"], "released by a fixed keep-alive at that attainment"),
                 "others_percent": single(by_all["others"], "released by Sirius or Serverless in the Wild, where they attain as much"),
                 "bound_percent": single(seen[BOUND].released, "released with foresight, without a cold start"),
                 "margin_points": single(by_all["margin"], "the lesser of 95 % of the bound and the best other"),
                 "dominated_points": single(by_all["dominated"], "a fixed keep-alive at that attainment"),
                 "partial_in_time_percent": single(partial.in_time, "where parts of models stay"),
                 "partial_released_percent": single(partial.released, "likewise"),
                 "partial_fixed_percent": single(by_parts["fixed"], "released by a fixed keep-alive at that attainment"),
                 "partial_margin_points": single(by_parts["margin"], "the lesser of 95 % of the bound and the best other"),
                 "partial_dominated_points": single(by_parts["dominated"], "a fixed keep-alive at that attainment")}, TARGETS)


def summary(cells: list[dict]) -> list[str]:
    def met(target: str) -> int:
        return sum(each["met"][target] for each in cells)

    values = [each["metrics"] for each in cells]
    best = sum(each["released_percent"]["value"] > max(each["fixed_percent"]["value"], each["others_percent"]["value"]) for each in values)
    bound = sum(each["released_percent"]["value"] >= 0.95 * each["bound_percent"]["value"] for each in values)
    parts = sum(each["partial_released_percent"]["value"] > each["released_percent"]["value"] + ALIKE for each in values)
    return [f"{met('margin_points.value')} of {len(cells)} cells release 95 % of the bound, or as much as every other policy; in {bound} the former, in {best} "
            f"more than every other; {len(cells) - met('dominated_points.value')} are dominated by a fixed keep-alive; {ALIKE} points are no difference",
            f"where parts of models stay {met('partial_margin_points.value')} do, and {len(cells) - met('partial_dominated_points.value')} are dominated; in {parts} "
            "more is released than by ours"]


def plot(curves: dict[tuple[str, int], dict], file: Path) -> None:
    """A panel for each trace: attainment against memory, of the middle latency."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "sluice", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    columns = len({trace for trace, _ in curves})
    rows = sorted({models for _, models in curves})
    figure, panels = pyplot.subplots(len(rows), columns, figsize=(2.4 * columns, 2.4 * len(rows)), squeeze=False, sharey=True)
    for number, ((trace, models), (ours, seen)) in enumerate(sorted(curves.items(), key=lambda each: each[0][1])):
        panel = panels[number // columns][number % columns]
        fixed = [seen[each] for each in FIXED]
        panel.plot([p.in_time for p in fixed], [p.released for p in fixed], "-", color="0.6", linewidth=1.5, label="fixed keep-alive")
        for name, mark in zip((*OTHERS, BOUND), "s^*", strict=True):
            panel.plot(seen[name].in_time, seen[name].released, mark, color="0.3", markersize=4, linestyle="none", label=name)
        for policy, mark, color in zip(OURS, "oD", ("tab:blue", "tab:green"), strict=True):
            points = [each[policy] for each in ours]
            panel.plot([p.in_time for p in points], [p.released for p in points], mark, color=color, markersize=4, label=f"{policy} (90, 95, 99 %)")
        panel.set_title(f"{trace}, {models} model{'s' if models > 1 else ''}")
        panel.set_xlabel("in time, %")
    for row in panels:
        row[0].set_ylabel("released, %")
    panels[0][0].legend(frameon=False, fontsize=6)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def sources(traces: Path | None, models: int) -> dict[str, Source]:
    rate = RATES[models]
    spread = ",zipf=1" if models > 1 else ""
    length_s = LENGTH_S[models]
    found = {name: Source(("--trace", what.format(rate=rate, high=1.8 * rate, low=0.2 * rate) + spread, "--length", f"{length_s}s", "--skip",
                           f"{length_s // 10}s"), 1) for name, what in GENERATED.items()}
    if traces:
        found |= {name: Source(("--trace", str(traces / file), "--skip", "350s"), FILE_SEEDS) for name, file in FILES.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with the Azure LLM traces")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the panels there, as SVG")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    wanted = [(models, name, source, latency) for models in MODELS for name, source in sources(args.traces, models).items() for latency in LATENCIES_MS]

    def compare(each: tuple[int, str, Source, int]) -> tuple[dict[int, dict[str, Point]], dict[str, Point]]:
        models, _, source, latency = each
        seen = simulate(args.preset, source, models, latency, 95, (*FIXED, *OTHERS, BOUND))
        return {percentile: simulate(args.preset, source, models, latency, percentile, OURS) for percentile in PERCENTILES}, seen

    cells, curves = [], {}
    with ThreadPoolExecutor(2) as workers:
        for number, ((models, name, _, latency), (ours, seen)) in enumerate(zip(wanted, workers.map(compare, wanted), strict=True), 1):
            cells += [cell({"trace": name, "models": models, "latency_ms": latency, "percentile": percentile}, *(points[each] for each in OURS), seen)
                      for percentile, points in ours.items()]
            if latency == LATENCIES_MS[1]:
                curves[name, models] = ours.values(), seen
            print(f"{number} of {len(wanted)}: {name}, {models} models, {latency} ms", flush=True)
    write("pareto", cells, summary=summary)
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
