"""What inference and training cost each other on one GPU: under Sluice, and under what there is without it.

    ./benchmarks/run.sh beside [--only cuda-resnet50-1] [--systems sluice "time slicing" mps "mps 50 %"] [--seconds 15]

Inference (beside_server.py) answers a Poisson process of requests, first alone, then beside each training job
(beside_job.py) under each system: `sluice` (the job under `sluice run`, the device claimed for each request), `time slicing`
(two plain processes), `mps` (both as clients of NVIDIA's multi-process service), and `mps 50 %` (training limited to half
of the multiprocessors). Ratios compare with each alone in the same run. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker
from overhead_models import WORKLOADS
from progress import Progress
from records import ROOT, Cell, distribution, single, write

from demonstration.processes import Failed

SYSTEMS = ("sluice", "time slicing", "mps", "mps 50 %")
#: Jobs, and whether none of their units is longer than a millisecond, so that the target holds for them.
JOBS = {"cuda-resnet50-1": True, "cuda-gpt2-medium-1": False, "cuda-vit-l-16-1": True}
POOL = "44GiB"
WARM_UP_STEPS = 30
PATIENCE_S = 120.0
GRACE_S = 20.0
MPS_CONTROL = "nvidia-cuda-mps-control"


@dataclass(frozen=True)
class Served:
    latency_us: list[float]
    began_ns: int
    ended_ns: int


class Stage:
    """A folder and the processes of one measurement; all have ended when it is left."""

    def __init__(self, binaries: Path, system: str) -> None:
        self._binaries = binaries
        self._system = system
        self._processes: list[subprocess.Popen] = []
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        self.folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="sluice-beside-")))
        self._progress = Progress(self.folder / "steps")
        self._environment = {**os.environ, "SLUICE_BROKER": str(self._binaries / "sluice")}
        if self._system.startswith("mps"):
            self._environment |= self._ends.enter_context(multi_process_service(self.folder))
        return self

    def __exit__(self, *_why: object) -> None:
        (self.folder / "enough").touch()
        for process in reversed(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)  # by itself: MPS minds clients that are killed
            process.terminate()
            process.wait()
        if self._system == "sluice" and (self.folder / "broker.sock").exists():
            end_broker(self.folder)
        self._ends.close()

    def train(self, name: str) -> None:
        """Starts the job and waits until it has warmed up. Raises Failed."""
        shared = self._system == "sluice"
        launcher = [self._binaries / "sluice", "run", "--backend", "cuda", "--runtime-dir", self.folder, "--memory", POOL,
                    "--require-pool", "--"] if shared else []
        half = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"} if self._system == "mps 50 %" else {}
        job = subprocess.Popen(
            [*launcher, sys.executable, ROOT / "benchmarks" / "beside_job.py", "--workload", name, "--until",
             self.folder / "enough", "--steps", self.folder / "steps", *(["--shared"] if shared else [])],
            env={**self._environment, **half})
        self._processes.append(job)
        self._progress.wait(lambda steps: len(steps) >= WARM_UP_STEPS, job.poll, PATIENCE_S)

    def steps_of(self, seconds: float) -> float:
        """Steps a second of the next so many seconds."""
        began = time.monotonic_ns()
        ended = began + int(1e9 * seconds)
        return self.rate(began, ended)

    def serve(self, rate: float, seconds: float, library: Path) -> Served:
        """Raises Failed."""
        claimer = ["--claimer", library, "--runtime-dir", self.folder] if self._system == "sluice" else []
        server = subprocess.Popen(
            [sys.executable, ROOT / "benchmarks" / "beside_server.py", "--rate", str(rate), "--seconds", str(seconds), *claimer],
            env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(server)
        if server.stdout.readline() != "ready\n":
            raise Failed(f"the inference server ended with {server.wait()}")
        server.stdin.write("\n")
        server.stdin.flush()
        said = server.stdout.readline()
        if not said:
            raise Failed(f"the inference server ended with {server.wait()}")
        server.stdin.write("\n")
        server.stdin.close()
        return Served(**json.loads(said))

    def rate(self, began_ns: int, ended_ns: int) -> float:
        """Steps a second between two instants."""
        self._progress.wait_beyond(ended_ns, self._processes[0].poll, PATIENCE_S)
        return self._progress.rate(began_ns, ended_ns, [1.0])


@contextlib.contextmanager
def multi_process_service(folder: Path) -> Iterator[dict[str, str]]:
    """Runs NVIDIA's daemon, and yields the environment of its clients."""
    where = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for each in where.values():
        Path(each).mkdir()
    control, environment = mps_control(), {**os.environ, **where}
    subprocess.run([control, "-d"], env=environment, check=True)
    try:
        yield where
    finally:
        subprocess.run([control], env=environment, input="quit\n", text=True, check=True, capture_output=True)


def mps_control() -> str | None:
    beside_driver = [Path(found).parent for found in (shutil.which("nvidia-smi"),) if found]
    return shutil.which(MPS_CONTROL, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, beside_driver)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=JOBS, default=[*JOBS])
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    build = ROOT / "build" / args.preset
    library = build / "lib" / "libsluice_bench_claimer.so"
    notes = []
    if not mps_control():
        notes.append(f"{MPS_CONTROL} is not installed: what needs it is left out")
    systems = [each for each in args.systems if not each.startswith("mps") or not notes]
    with Stage(build / "bin", "alone") as stage:
        alone = distribution(stage.serve(args.rate, args.seconds, library).latency_us)
    cells = [Cell({"job": "none", "system": "alone", "rate_per_s": args.rate}, {"inference_us": alone})]
    for name in args.only:
        with Stage(build / "bin", "alone") as stage:
            stage.train(name)
            training_alone = stage.steps_of(args.seconds)
        for system in systems:
            with Stage(build / "bin", system) as stage:
                stage.train(name)
                served = stage.serve(args.rate, args.seconds, library)
                training = stage.rate(served.began_ns, served.ended_ns)
            latency = distribution(served.latency_us)
            metrics = {"inference_us": latency, "training_per_s": single(training),
                       **{f"inference_{part}_ratio": single(latency[part] / alone[part], baseline="alone, same run")
                          for part in ("p50", "p99")},
                       "training_ratio": single(training / training_alone, baseline="alone, same run")}
            targets = {"training_ratio.value": ">= 0.9", **({"inference_p99_ratio.value": "<= 1.25"} if JOBS[name] else {})}
            cells.append(Cell({**WORKLOADS[name].params, "system": system, "rate_per_s": args.rate}, metrics,
                              targets if system == "sluice" else {}))
            print(f"{name}, {system} done", file=sys.stderr, flush=True)
    write("beside", cells, gpus=1, accumulate=True, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
