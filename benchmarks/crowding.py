"""What share of requests is answered in time, and what memory training has meanwhile, where a device has not the memory for all of its models.

    ./benchmarks/run.sh crowding --traces FOLDER

A cell is a trace of `pareto` for eight models of 16 GiB, a share of their memory that the device has, and a latency; nine of ten requests of
each model are promised within it, in 95 % of its windows. That takes some 95 % of all requests; beyond them memory is training's, so more
is no gain. Where memory is short models leave for others' cold starts. Compared are the scheduler's own code, which keeps whole models,
the same with parts of models that stay, chosen for all models together, a cache (everything stays until another one needs its memory, the
longest idle goes first), Sirius, and what foresight would do.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from pareto import ALIKE, Source, run, sources
from records import Cell, single, write

MODELS = 8
MEMORY = (0.25, 0.5, 0.75)
LATENCIES_MS = (300, 400)
PERCENTILE = 90
ENOUGH_PERCENT = 95.0
#: By what they are called in the record.
POLICIES = {"ours": "ours", "partial": "partial", "cache": "always", "sirius": "sirius", "foresight": "clairvoyant"}
TARGETS = {"gain_percent.value": f">= -{ALIKE}"}


def cell(preset: str, name: str, source: Source, memory: float, latency_ms: int) -> Cell:
    rows = [row for seed in range(1, source.seeds + 1)
            for row in run(preset, source, seed, MODELS, latency_ms, PERCENTILE, tuple(POLICIES.values()), memory) if row["model"] == "all"]

    def mean(policy: str, column: str) -> float:
        return statistics.fmean(100 * float(row[column]) for row in rows if row["policy"] == POLICIES[policy])

    figures = {f"{policy}_{what}_percent": single(mean(policy, column))
               for policy in POLICIES for what, column in (("in_time", "in_time"), ("released", "released_share"))}

    def gained(policy: str) -> float:
        return min(ENOUGH_PERCENT, mean(policy, "in_time"))

    return Cell({"trace": name, "memory": memory, "latency_ms": latency_ms},
                {**figures, "predicted_percent": single(mean("partial", "predicted_in_time"), "where parts of models stay"),
                 "gain_percent": single(gained("partial") - max(map(gained, ("ours", "cache", "sirius"))),
                                        "in time up to 95, of `partial` over the best but foresight")}, TARGETS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with the Azure LLM traces")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    cells = []
    for name, source in sources(args.traces, MODELS).items():
        for memory in MEMORY:
            for latency_ms in LATENCIES_MS:
                cells.append(cell(args.preset, name, source, memory, latency_ms))
                print(f"{name}, memory for {memory:.0%}, {latency_ms} ms", flush=True)
    write("crowding", cells)


if __name__ == "__main__":
    main()
