"""Benchmark records: the files in benchmarks/results that README and docs quote.

    from records import Cell, distribution, single, write

    cell = Cell({"size_mib": 256}, {"latency_us": distribution(samples)}, {"latency_us.p50": "<= 15000"})
    write("handover", [cell])                    # benchmarks/results/handover-host.json, and a table

A record says which tree was measured on which machine, and holds one cell for each set of parameters. Names of metrics
end in their unit (`_us`, `_ms`, `_bytes`, `_per_s`, `_ratio`, `_percent`, `_nats`). A target is `METRIC.FIELD` and a bound such
as `<= 500`; `met` is computed from it. What was missed stays in the file as false.
"""

import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNITS = ("us", "ms", "s", "bytes", "per_s", "ratio", "percent", "nats")
#: Metrics without a unit.
COUNTS = ("aborts", "rebuilds", "kills", "killed_trainers", "killed_servers", "killed_brokers", "leaked_chunks", "hangs",
          "server_errors", "wrong_contents", "failed_starts", "served", "handovers", "probes",
          "probes_that_saw", "revocations", "faults", "refused", "undisturbed_runs", "stitched_ranges", "stitched_chunks",
          "stitched_chunks_mean", "touched_chunks", "kept_chunks", "runs", "steps", "parks", "bit_equal", "discards",
          "optimizer_in_vain", "discarding_steps", "collectives", "wrong", "timeouts", "pauses", "idle_share", "lost_points", "error_points",
          "margin_points", "dominated_points", "partial_margin_points", "partial_dominated_points",
          "bytes_per_model", "bytes_per_request", "decisions_per_tick", "preempted")
BOUND = re.compile(r"(<=|>=|<|>)\s*([0-9.eE+-]+)")


@dataclass(frozen=True)
class Cell:
    """One set of parameters and what was measured. Raises ValueError for a metric or target that is not sound."""

    params: dict
    metrics: dict[str, dict]
    targets: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in COUNTS and not name.endswith(tuple(f"_{unit}" for unit in UNITS)):
                raise ValueError(f"the metric '{name}' must end in its unit: _{', _'.join(UNITS)}")
        self.met()

    def met(self) -> dict[str, bool]:
        return {target: self._holds(target, bound) for target, bound in self.targets.items()}

    def _holds(self, target: str, bound: str) -> bool:
        name, _, part = target.rpartition(".")
        parsed = BOUND.fullmatch(bound)
        if not parsed or part not in self.metrics.get(name, {}):
            raise ValueError(f"the target '{target}': '{bound}' needs a metric's field and a bound such as '<= 500'")
        value, limit = self.metrics[name][part], float(parsed[2])
        return {"<=": value <= limit, ">=": value >= limit, "<": value < limit, ">": value > limit}[parsed[1]]

    def as_json(self) -> dict:
        return {"params": self.params, "metrics": self.metrics, "targets": self.targets, "met": self.met()}


def distribution(samples: Iterable[float]) -> dict[str, float | int]:
    """n, p50, p90, p99 and max; each the smallest sample with that share of all at or below it."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("a distribution needs at least one sample")
    if not all(map(math.isfinite, ordered)):
        raise ValueError("a distribution's samples must be finite")
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"n": len(ordered), **{
        name: rounded(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) for name, share in at.items()}}


def single(value: float, baseline: str | None = None, ci95: tuple[float, float] | None = None) -> dict:
    """One value; where it is a comparison, with what, and its 95 % confidence interval."""
    result: dict = {"value": rounded(value)}
    if baseline is not None:
        result["baseline"] = baseline
    if ci95 is not None:
        result["ci95"] = [rounded(end) for end in ci95]
    return result


def rounded(value: float) -> float:
    """Five significant digits; a measurement has no more."""
    return value if isinstance(value, int) else float(f"{value:.5g}")


# --- the machine and the tree -----------------------------------------------------------------------------------------


def _output(*command: str) -> str | None:
    """What a program prints; None where it is not there or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def tree() -> dict:
    """Commit, and whether anything but the records differs from it. SLUICE_COMMIT speaks for a copy without history."""
    if re.fullmatch("[0-9a-f]{40}", named := os.environ.get("SLUICE_COMMIT", "")):
        return {"commit": named, "dirty": False}
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return {"commit": named or "unknown", "dirty": True}
    changes = _output("git", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {"commit": commit, "dirty": changes != ""}


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown processor"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else "unknown processor"


def machine(gpus: int) -> dict:
    """Device, versions and cores, for a measurement that used `gpus` GPUs (0: the host backend)."""
    import torch

    driver = None
    if gpus:
        listed = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = listed.splitlines()[0].strip() if listed else None
    return {
        "device": torch.cuda.get_device_name(0) if gpus else processor(), "gpus": gpus, "driver": driver,
        "cuda": torch.version.cuda if gpus else None, "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "cpu_cores": len(os.sched_getaffinity(0)),
    }


def slug(device: str, gpus: int) -> str:
    """`host`, or the GPU's short name, with the number of GPUs if there are several: `h200`, `h200-x2`."""
    if gpus == 0:
        return "host"
    words = re.sub(r"[^a-z0-9 ]", " ", device.lower().replace("nvidia", "")).split()
    return "-".join(words[:1] or ["gpu"]) + (f"-x{gpus}" if gpus > 1 else "")


# --- the file ---------------------------------------------------------------------------------------------------------


def write(name: str, cells: list[Cell], *, gpus: int = 0, accumulate: bool = False, notes: Iterable[str] = (),
          summary: Callable[[list[dict]], list[str]] | None = None,
          folder: Path = RESULTS) -> Path:
    """Writes the record and prints its table.

    With `accumulate`, cells of the record that is there stay if their parameters were not measured this time; every
    cell then carries its own commit, dirty, date and device. Several runs may accumulate at once. `notes` say what was left out; `summary` writes more of them, from all
    cells that the record will have.
    """
    if not cells:
        raise ValueError("a record needs at least one cell")
    where, now = tree(), machine(gpus)
    date = datetime.date.today().isoformat()
    file = folder / f"{name}-{slug(now['device'], gpus)}.json"
    measured = [cell.as_json() for cell in cells]
    words = [Path(sys.argv[0]).stem, *sys.argv[1:]]
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if accumulate:
            measured = _merged(file, [{**cell, **where, "date": date, "device": now["device"]} for cell in measured])
        record = {"name": name, **where, "date": date, **now,
                  "command": shlex.join(["benchmarks/run.sh", *words]), "cells": measured}
        if notes := [*notes, *(summary(measured) if summary else [])]:
            record["notes"] = notes
        part = file.with_suffix(".part")
        part.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(file)
    print(table(record))
    print(f"written to {file}" + (" (dirty: for trying, not for quoting)" if where["dirty"] else ""))
    return file


def record_of(name: str, *, gpus: int = 0, folder: Path = RESULTS) -> dict:
    """This machine's record of that name, empty if there is none yet."""
    file = folder / f"{name}-{slug(machine(gpus)['device'], gpus)}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else writes to the folder meanwhile."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _merged(file: Path, measured: list[dict]) -> list[dict]:
    """The new cells, and those of the file whose parameters are not among them, in the file's order."""
    if not file.exists():
        return measured
    old = json.loads(file.read_text(encoding="utf-8"))
    inherited = {key: old[key] for key in ("commit", "dirty", "date", "device")}
    fresh = {json.dumps(cell["params"], sort_keys=True): cell for cell in measured}
    kept = [fresh.pop(json.dumps(cell["params"], sort_keys=True), {**inherited, **cell}) for cell in old["cells"]]
    return kept + list(fresh.values())


def table(record: dict) -> str:
    """One line for each metric of each cell."""
    lines = [("parameters", "metric", "value", "")]
    for cell in record["cells"]:
        label = ", ".join(f"{key} {value}" for key, value in cell["params"].items())
        for name, metric in cell["metrics"].items():
            if "value" in metric:
                value = str(metric["value"])
                if "ci95" in metric:
                    value += " [{}, {}]".format(*metric["ci95"])
            else:
                value = "  ".join(f"{key} {metric[key]}" for key in ("p50", "p90", "p99", "max", "n"))
            targets = [f"{target.rpartition('.')[2]} {bound}: {'met' if cell['met'][target] else 'MISSED'}"
                       for target, bound in cell["targets"].items() if target.rpartition(".")[0] == name]
            lines.append((label, name, value, "; ".join(targets)))
            label = ""
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    text = ["  ".join(part.ljust(width) for part, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([f"{record['name']} on {record['device']}", *text, *record.get("notes", [])])
