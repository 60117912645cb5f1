#!/usr/bin/env python3
"""Shows a training job and an inference server that share one memory pool. quickstart.sh sets everything up for it.

Three phases: training alone; serving alone; both on one pool, under an open-loop Poisson load with idle phases.
Training makes the same number of steps from the same seed both times. At the end comes a table, and the exit status is
0 only if what it shows off happened: 1 if not, 2 if the demonstration could not be run.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from demonstration import phases, report
from demonstration.processes import Failed, Stage, has_cuda

ROOT = Path(__file__).resolve().parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHORTEST_OFF_SECONDS = 3.5  # longer than the idle timeout that the policies lead to


class Ended(Exception):
    """A signal asks for the end."""


def end(number: int, _frame: object) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a second one must not cut the clearing up short
    raise Ended(signal.Signals(number).name)


def say(text: str) -> None:
    print(text, flush=True)


def show(look: dict) -> None:
    say(f"    {look['seconds']:5.1f} s  training {report.mib(look['training']):>9}  serving "
        f"{report.mib(look['serving']):>8}  free {report.mib(look['free']):>8}  micro-batch {look['micro_batch']:>3}  "
        f"discarded {look['discards']}")


def perform(options: argparse.Namespace, sluice: Path) -> list[str]:
    """Runs the phases, prints the table, and returns what did not happen."""
    backend = options.backend if options.backend != "auto" else "cuda" if has_cuda() else "host"
    setting = phases.SETTINGS[backend]
    # Threads that wait by spinning would take the processor from the process that has work.
    environment = {"OMP_WAIT_POLICY": "passive"}
    say(f"==> Training alone, in a pool of {phases.pool_memory(setting.policy)} ({backend} backend)")
    with Stage(sluice, options.logs / "training-alone", environment) as stage:
        alone = phases.training_alone(stage, setting, options.seed, options.seconds)
    say(f"    {alone.steps} steps, {alone.samples_per_s:.1f} samples/s, loss {alone.final['loss']:.4f}")

    # Long enough for training to take back what it gave, and to show it in a step.
    off = max(SHORTEST_OFF_SECONDS, 1.5 + 3 * alone.step_seconds)
    on = max(2.0, alone.step_seconds)
    say(f"==> Serving alone: {on:.1f} s of load, {off:.1f} s of rest, and again")
    with Stage(sluice, options.logs / "serving-alone", environment) as stage:
        serving = phases.serving_alone(stage, setting, options.seed, options.port, 2 * on + off, on, off)
    say(f"    {report.answers(serving)} answers right")

    say(f"==> Both on one pool, the same load until training has made {alone.steps} steps again")
    with Stage(sluice, options.logs / "together", environment) as stage:
        both = phases.together(stage, setting, options.seed, options.port, alone, on, off, show)

    table = report.rows(setting, alone, serving, both)
    missing = report.shortfalls(setting, alone, serving, both)
    say("\n" + report.as_text(table))
    say(f"\nthe losses differ by {report.loss_difference(alone, both.training):.1e} of themselves; up to "
        f"{setting.loss_tolerance:g} is rounding")
    if options.json:
        options.json.write_text(json.dumps({
            "backend": backend, "table": table, "shortfalls": missing, "serving_alone": serving,
            "serving_together": both.load, "training_alone": alone.final, "training_together": both.training.final,
            "looks": both.looks, "status": both.status}, indent=1) + "\n")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="quickstart.sh", description="Training and serving on one memory pool.")
    parser.add_argument("--backend", choices=["auto", "host", "cuda"], default="auto",
                        help="auto takes a GPU if there is one")
    parser.add_argument("--seconds", type=float, default=10.0,
                        help="of training alone, which sets the number of steps (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="of the server; any free one if it is taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "quickstart", help="default: build/quickstart")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--sluice", type=Path, default=ROOT / "build" / "release" / "bin" / "sluice",
                        help="the program (default: build/release/bin/sluice)")
    options = parser.parse_args()
    if not options.sluice.exists():
        parser.error(f"there is no {options.sluice}; run ./scripts/build.sh")

    for number in SIGNALS:
        signal.signal(number, end)
    started = time.monotonic()
    try:
        missing = perform(options, options.sluice.absolute())
    except Failed as failure:
        print(f"quickstart: {failure}", file=sys.stderr)
        return 2
    except Ended as asked:
        print(f"quickstart: ended by {asked}", file=sys.stderr)
        return 128 + signal.Signals[str(asked)]
    for each in missing:
        print(f"quickstart: {each}", file=sys.stderr)
    say(f"took {time.monotonic() - started:.0f} s; logs in {options.logs}")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
