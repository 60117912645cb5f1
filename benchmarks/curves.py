"""Whether training reaches the same loss when its memory is taken away again and again.

    ./benchmarks/run.sh curves [--only digits] [--plot docs/figures/curves.svg]

The examples train so many steps in plain PyTorch, then the same steps under `sluice run` while a server takes memory out
of them at random instants. Slices may become smaller then, so that losses agree to rounding, which training amplifies:
the record compares the mean over the last tenth of the steps, and the plot shows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from brokers import clear_up_on_sigterm, job_in_pool
from records import ROOT, Cell, single, write

MIB = 1 << 20


@dataclass(frozen=True)
class Example:
    """A training script, how many steps it makes, and how it is disturbed."""

    script: str
    steps: int
    pool: str
    taken_mib: int
    most_delay_ms: int


EXAMPLES = {
    "host": {"digits": Example("train_digits.py", 600, "64MiB", 6, 150),
             "charlm": Example("train_charlm.py", 150, "512MiB", 64, 2500)},
    "cuda": {"digits": Example("train_digits.py", 3000, "1GiB", 32, 150),
             "charlm": Example("train_charlm.py", 600, "8GiB", 1024, 500)},
}


@dataclass(frozen=True)
class Curve:
    """The loss after each step, and after which of them a micro-batch had been discarded."""

    losses: list[float]
    discarded_at: list[int]

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-len(self.losses) // 10:])


def read(log: Path) -> Curve:
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if not line.get("final")]
    before = [0, *(line["discards"] for line in lines)]
    return Curve([line["loss"] for line in lines],
                 [line["step"] for line, earlier in zip(lines, before, strict=False) if line["discards"] > earlier])


def is_complete(log: Path) -> bool:
    return log.exists() and '"final": true' in log.read_text(encoding="utf-8")


def train(example: Example, backend: str, binaries: Path, disturbed: bool) -> Curve:
    """Raises subprocess.CalledProcessError if training fails."""
    with tempfile.TemporaryDirectory(prefix="sluice-curves-") as there:
        folder = Path(there)
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "SLUICE_BROKER": str(binaries / "sluice")}
        command = [sys.executable, ROOT / "examples" / example.script, "--steps", str(example.steps), "--log", folder / "log",
                   "--log-interval", "0", "--device", "cuda" if backend == "cuda" else "cpu"]
        if not disturbed:
            subprocess.run(command, env=environment, check=True)
            return read(folder / "log")
        with job_in_pool(binaries / "sluice", backend, folder, ["--memory", example.pool, "--require-pool"], command,
                         environment) as training:
            server = subprocess.Popen(
                [binaries / "sluice-bench-handover", "--runtime-dir", folder, "--bytes", str(example.taken_mib * MIB),
                 "--count", str(1 << 30), "--delay-ms", str(example.most_delay_ms), "--fill"],
                env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                # What an example evaluates in the end would wait for the memory that the server has filled up.
                while training.poll() is None and not is_complete(folder / "log"):
                    time.sleep(0.1)
            finally:
                server.kill()
                server.wait()
            if training.wait() != 0:
                raise subprocess.CalledProcessError(training.returncode, command)
        return read(folder / "log")


def plot(curves: dict[str, tuple[Curve, Curve]], file: Path) -> None:
    """One panel an example: both losses over the steps, and a mark at each step with a discard."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "sluice", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.5 * len(curves), 3), squeeze=False)
    for panel, (name, (plain, disturbed)) in zip(panels[0], curves.items(), strict=True):
        steps = range(1, len(plain.losses) + 1)
        panel.plot(steps, plain.losses, color="0.6", linewidth=3, label="plain PyTorch")
        panel.plot(steps, disturbed.losses, color="tab:blue", linewidth=1, label="memory taken away")
        panel.plot(disturbed.discarded_at, [min(plain.losses) * 0.9] * len(disturbed.discarded_at), "|", color="tab:red",
                   markersize=5, label="a micro-batch discarded")
        panel.set(title=name, xlabel="step", yscale="log")
        panel.legend(frameon=False)
    panels[0][0].set_ylabel("loss")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--only", nargs="*", choices=EXAMPLES["host"], help="default: all")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, as SVG")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    cells, curves = [], {}
    for name in args.only or EXAMPLES[args.backend]:
        example = EXAMPLES[args.backend][name]
        plain, disturbed = (train(example, args.backend, ROOT / "build" / args.preset / "bin", each) for each in (False, True))
        curves[name] = plain, disturbed
        metrics = {"steps": single(len(disturbed.losses)), "discarding_steps": single(len(disturbed.discarded_at)),
                   "first_loss_ratio": single(disturbed.losses[0] / plain.losses[0], baseline="plain PyTorch, same run"),
                   "final_loss_ratio": single(disturbed.final / plain.final, baseline="plain PyTorch, same run")}
        cells.append(Cell({"example": name}, metrics, {"final_loss_ratio.value": "<= 1.02"}))
    write("curves", cells, gpus=1 if args.backend == "cuda" else 0, accumulate=True)
    if args.plot:
        plot(curves, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
