"""The demonstration of examples/quickstart.sh as a record: training and serving alone, and both on one pool.

Needs what quickstart.sh sets up. The record's notes are the table that the demonstration printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from records import ROOT, Cell, single, write

sys.path.insert(0, str(ROOT / "examples"))
from demonstration import report  # noqa: E402


def cell_of(result: dict, seconds: float) -> Cell:
    alone, together = result["training_alone"], result["training_together"]
    handovers = result["status"]["handovers"]
    metrics = {
        "training_alone_per_s": single(alone["samples_per_s"]),
        "training_ratio": single(together["samples_per_s"] / alone["samples_per_s"], "training alone, same run"),
        "loss_ratio": single(together["loss"] / alone["loss"], "training alone, same steps"),
        "handover_latency_us": handovers["latency_us"],
        "to_serving_bytes": single(handovers["bytes_to_serving"]),
        "to_training_bytes": single(handovers["bytes_to_training"]),
    }
    for phase in ("alone", "together"):
        for model, measured in result[f"serving_{phase}"]["models"].items():
            for kind in ("warm_ms", "cold_ms"):
                metrics[f"{model}_{phase}_{kind}"] = measured[kind]
    return Cell({"backend": result["backend"], "seconds": seconds, "steps": alone["step"]}, metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of training alone (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        shown = subprocess.run([sys.executable, ROOT / "examples" / "quickstart.py", "--seconds", str(options.seconds),
                                "--json", file], check=False)
        if shown.returncode != 0:
            return shown.returncode
        result = json.loads(file.read_text(encoding="utf-8"))
    table = report.as_text([tuple(row) for row in result["table"]]).splitlines()
    write("demonstration", [cell_of(result, options.seconds)], gpus=1 if result["backend"] == "cuda" else 0, notes=table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
