"""Benchmark records: the files in benchmarks/results that README and docs quote.

    record = Record("handover", "benchmarks/run.sh handover", host=True)
    record.cell({"size_mib": 256}, {"latency_us": distribution(samples)}, {"latency_us.p50": "<= 15000"})
    print(record.table())
    print(record.write())                        # benchmarks/results/handover-host.json

A record says which tree was measured on which machine, and holds one cell for each set of parameters. Names of metrics
end in their unit (`_us`, `_ms`, `_bytes`, `_per_s`, `_ratio`, `_percent`). A target is `METRIC.FIELD` and a bound such
as `<= 500`; `met` is computed from it. What was missed stays in the file as false.
"""

import datetime
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNITS = ("us", "ms", "s", "bytes", "per_s", "ratio", "percent")
COUNTS = ("aborts", "rebuilds")  # metrics without a unit
BOUND = re.compile(r"(<=|>=|<|>)\s*([0-9.eE+-]+)")


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
    """Commit, and whether anything but the records differs from it."""
    commit = _output("git", "rev-parse", "HEAD")
    if commit is not None:
        changes = _output("git", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
        return {"commit": commit, "dirty": changes != ""}
    named = os.environ.get("SLUICE_COMMIT", "")
    return {"commit": named or "unknown", "dirty": not re.fullmatch("[0-9a-f]{40}", named)}


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


class Record:
    """What one command measured on one machine.

    Args:
        name: As in the file's name.
        command: That measures it again.
        host: Whether it was measured on the host backend; else on `gpus` GPUs.
        accumulate: Keep the cells of the record that is there whose parameters were not measured this time. Every cell
            then carries its own commit, dirty and date.
        folder: Where records lie.
    """

    def __init__(self, name: str, command: str, *, host: bool, gpus: int = 1, accumulate: bool = False,
                 folder: Path = RESULTS) -> None:
        self._head = {"name": name, **tree(), "date": datetime.date.today().isoformat(),
                      **machine(0 if host else gpus), "command": command}
        self._accumulate = accumulate
        self._cells: list[dict] = []
        self._notes: list[str] = []
        self._file = folder / f"{name}-{slug(self._head['device'], self._head['gpus'])}.json"

    def cell(self, params: dict, metrics: dict[str, dict], targets: dict[str, str] | None = None) -> None:
        """Adds one set of parameters and what was measured. Raises ValueError for metrics or targets that are unsound."""
        for name in metrics:
            if name not in COUNTS and not name.endswith(tuple(f"_{unit}" for unit in UNITS)):
                raise ValueError(f"the metric '{name}' must end in its unit: _{', _'.join(UNITS)}")
        targets = targets or {}
        met = {target: holds(metrics, target, bound) for target, bound in targets.items()}
        self._cells.append({"params": params, "metrics": metrics, "targets": targets, "met": met})

    def note(self, text: str) -> None:
        """Says, in the record, what was left out and why."""
        self._notes.append(text)

    def as_json(self) -> dict:
        cells = self._cells
        if self._accumulate:
            own = {key: self._head[key] for key in ("commit", "dirty", "date")}
            cells = _merged(self._file, [{**cell, **own} for cell in cells])
        return {**self._head, "cells": cells, **({"notes": self._notes} if self._notes else {})}

    def table(self) -> str:
        """One line for each metric of each cell."""
        return _table(self.as_json())

    def write(self) -> Path:
        """Writes the file, at once or not at all, and returns its path. Raises ValueError without a cell."""
        if not self._cells:
            raise ValueError("a record needs at least one cell")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(self._file)
        return self._file


def holds(metrics: dict[str, dict], target: str, bound: str) -> bool:
    """Whether the field `target` of the metrics is within `bound`."""
    name, _, part = target.rpartition(".")
    parsed = BOUND.fullmatch(bound)
    if not parsed or part not in metrics.get(name, {}):
        raise ValueError(f"the target '{target}': '{bound}' needs a metric's field and a bound such as '<= 500'")
    value, limit = metrics[name][part], float(parsed[2])
    return {"<=": value <= limit, ">=": value >= limit, "<": value < limit, ">": value > limit}[parsed[1]]


def _merged(file: Path, measured: list[dict]) -> list[dict]:
    """The new cells, and those of the file whose parameters are not among them, in the file's order."""
    if not file.exists():
        return measured
    old = json.loads(file.read_text(encoding="utf-8"))
    inherited = {key: old[key] for key in ("commit", "dirty", "date")}
    fresh = {json.dumps(cell["params"], sort_keys=True): cell for cell in measured}
    kept = [fresh.pop(json.dumps(cell["params"], sort_keys=True), {**inherited, **cell}) for cell in old["cells"]]
    return kept + list(fresh.values())


def _table(record: dict) -> str:
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
    dirty = ["dirty: for trying, not for quoting"] if record["dirty"] else []
    return "\n".join([f"{record['name']} on {record['device']}", *text, *record.get("notes", []), *dirty])
