"""Whether training learns the same, bit by bit, when its memory is taken away at random instants.

A job (exact_job.py) trains under `sluice run` while a server takes memory from it; then the same number of steps is
trained in plain PyTorch. Weights, buffers and optimizer state must agree in every bit. On a processor plain PyTorch itself is
seldom, but at times, not the same in every bit from one process to the next: where the two differ, it must agree with itself
before that counts (``reference``). A demand counts for the phase
that the job's Python was in at that instant; on CUDA the GPU is behind it, by up to a step. Without hooks around it the
optimizer counts as commit. With --kinds it is a job with a rank on each of two or four GPUs (exact_ranks_job.py), and a
server on each takes memory from its rank; where there are fewer GPUs, or none, they share. With --beside there are two such jobs at
once in one runtime folder, the second on the GPUs behind the first one's. With --loops it is one of the
loops of exact_loops_job.py, and its server holds launches before each demand until that is met: none may wait for what the
pause holds, so that it takes no longer than the operator, or the kernel, that it meets.
"""

from __future__ import annotations

import argparse
import bisect
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from brokers import clear_up_on_sigterm, jobs_in_pools
from records import Cell, distribution, single, write

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
PHASES = ("forward", "backward", "commit", "optimizer")


@dataclass(frozen=True)
class Job:
    """A job's arguments, and how it is disturbed."""

    backend: str
    arguments: tuple[str, ...]
    demand_bytes: int
    most_delay_ms: int
    pool: tuple[str, ...] = ()  # options of `sluice run`
    script: Path = BENCHMARKS / "exact_job.py"  # or another program that takes --until, --steps and --out, and writes the same
    devices: tuple[int, ...] = ()  # a server on each; empty: on the pool's only one
    paused: bool = False  # by the server, with each demand


HOST = Job("host", ("--device", "cpu", "--hooked"), 28 << 20, 150, ("--memory", "192MiB"))
CUDA = Job("cuda", ("--device", "cuda", "--width", "64", "--batch", "4096", "--micro-batch", "1024"), 1 << 30, 150,
           ("--memory", "12GiB"))
# Pools hold what the model needs and little more: what is free beside it would have to be moved with every demand.
MODELS = {
    name: Job("cuda", ("--device", "cuda", "--model", name, "--batch", batch, "--micro-batch", micro_batch), 1 << 30,
              most_delay_ms, ("--memory", memory))
    for name, batch, micro_batch, memory, most_delay_ms in (
        ("resnet50", "128", "32", "12GiB", 50), ("gpt2-medium", "8", "2", "32GiB", 120), ("vit-l-16", "64", "16", "32GiB", 120))
}


#: How the small network is trained, in exact_job.py and in its like for libtorch (tests/runtime/torch_step/step_job.cpp) the same;
#: and by which of them. It has batch statistics and dropout.
WAYS = {
    "adamw": ("python", "c++"),
    "lbfgs": ("python", "c++"),  # which calls a closure
    "scaled": ("python", "c++"),  # by a gradient scaler whose steps overflow at first, in low precision, and clipped
    "compiled": ("python",),
}


def in_way(job: Job, way: str) -> Job:
    """A job of the small network in one of `WAYS`. In low precision its arena is smaller."""
    demand_bytes = job.demand_bytes * 3 // 4 if way == "scaled" else job.demand_bytes
    return replace(job, arguments=(*job.arguments, "--way", way), demand_bytes=demand_bytes)


@dataclass(frozen=True)
class Kind:
    """Of jobs of several ranks, which may have to share a GPU. A demand takes less than an arena."""

    ranks: int
    demand_bytes: int
    host_demand_bytes: int | None  # None: not for the host
    copies: int = 1  # ranks that have the same samples, and different parts of the same layers


KINDS = {"replicas": Kind(2, 3 << 30, 20 << 20), "synchronised": Kind(2, 2 << 30, None), "shards": Kind(2, 1536 << 20, 20 << 20),
         "hybrid": Kind(4, 2 << 30, 20 << 20), "tensors": Kind(2, 2 << 30, 20 << 20, 2), "grid": Kind(4, 2 << 30, 20 << 20, 2)}


#: Those of exact_loops_job.py, which do not need torch to be named; and how much wider they are on a GPU.
LOOPS = ("vit", "vit-reentrant", "gru", "convolutions", "gan", "spectral-norm", "compiled")
SCALE = 8
#: What a paused job's demand may take beside the operator that it meets.
MOST_DRAIN_US = 100_000


def of_loop(name: str, backend: str) -> Job:
    script = BENCHMARKS / "exact_loops_job.py"
    if backend == "host":
        return Job("host", ("--loop", name, "--device", "cpu"), 20 << 20, 300, HOST.pool, script, paused=True)
    return Job("cuda", ("--loop", name, "--device", "cuda", "--scale", str(SCALE)), 192 << 20, 50,
               ("--memory", "8GiB"), script, paused=True)


#: What shards may be of, in exact_ranks_job.py.
LAYERS = ("plain", "checkpointed", "compiled")


def of_ranks(kind: str, gpus: int, place: int = 0) -> Job:
    """A job of a kind, on as many GPUs as it has ranks, if there are so many; 0: on the host. `place`: so many others of its kind
    are there already, on the GPUs before its own; on the host its pool is another one."""
    script = BENCHMARKS / "exact_ranks_job.py"
    of = KINDS[kind]
    if gpus == 0:
        if of.host_demand_bytes is None:
            raise SystemExit(f"exactness: {kind} is for GPUs alone")
        return Job("host", ("--kind", kind), of.host_demand_bytes, 300, (*HOST.pool, "--device", str(place)), script, (place,))
    first = place * of.ranks
    devices = tuple(range(first, min(gpus, first + of.ranks)))
    if not devices:
        raise SystemExit(f"exactness: a job of {of.ranks} ranks behind {place} others needs more than {gpus} GPUs")
    memory = f"{6 * -(-of.ranks // len(devices))}GiB"
    return Job("cuda", ("--device", "cuda", "--kind", kind, "--first-gpu", str(first)), of.demand_bytes, 40, ("--memory", memory),
               script, devices)


@dataclass(frozen=True)
class Outcome:
    """Both runs as exact_job.py describes them, how many undisturbed ones it took, in which phase each demand met the
    disturbed one, and what it took."""

    disturbed: dict
    undisturbed: dict
    undisturbed_runs: int
    demands: Counter
    handovers: list[dict]  # as sluice-bench-handover describes them

    @property
    def same(self) -> bool:
        return agree(self.disturbed, self.undisturbed)

    def __str__(self) -> str:
        if self.same:
            return "bit-equal"
        pairs = zip(self.disturbed["losses"], self.undisturbed["losses"], strict=True)
        parted = next((f"from step {step} on" for step, (a, b) in enumerate(pairs, 1) if a != b), "in the last step")
        return f"DIFFERENT {parted}"


def agree(one: dict, other: dict) -> bool:
    return all(one[key] == other[key] for key in ("digest", "losses", "steps"))


def reference(train: Callable[[], dict], disturbed: dict) -> tuple[dict, int]:
    """What plain PyTorch learns, and how many runs it took: one that agrees with the disturbed run, or else two that agree
    with each other. Raises RuntimeError if no two of five do."""
    runs: list[dict] = []
    while len(runs) < 5:
        run = train()
        if not runs and agree(run, disturbed) or any(agree(run, other) for other in runs):
            return run, len(runs) + 1
        runs.append(run)
    raise RuntimeError("plain PyTorch has learnt something else in each of five runs; nothing can be compared with that")


def environment() -> dict[str, str]:
    """The same for both runs: sums depend on the number of threads, on what a compiler finds to be fastest when it tries, and on
    whether its code is new or comes out of its caches, which the first run would fill for the second."""
    package = str(ROOT / "runtime" / "python")
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_DETERMINISTIC": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "PYTHONPATH": path}


def served(training: subprocess.Popen, commands: list[list], env: dict[str, str]) -> list[subprocess.CompletedProcess]:
    """How servers have ended that run beside training, and end when that does."""
    servers = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for command in commands]

    def end_with_training() -> None:
        training.wait()
        for server in servers:
            server.terminate()

    threading.Thread(target=end_with_training, daemon=True).start()

    def ended(server: subprocess.Popen) -> subprocess.CompletedProcess:
        out, err = server.communicate()
        return subprocess.CompletedProcess(server.args, server.returncode, out, err)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(ended, servers))


def compare(job: Job, demands: int, seed: int, binaries: Path, more: tuple[str, ...] = ()) -> Outcome:
    """Trains disturbed by so many demands on each device, then undisturbed. `more` goes to both jobs."""
    return compare_beside([job], demands, seed, binaries, more)[0]


def compare_beside(jobs: list[Job], demands: int, seed: int, binaries: Path, more: tuple[str, ...] = ()) -> list[Outcome]:
    """The same of several jobs of one backend that train at once, in one runtime folder."""
    with tempfile.TemporaryDirectory(prefix="sluice-exact-") as name, concurrent.futures.ThreadPoolExecutor() as at_once:
        runtime = Path(name)
        folders = [runtime / f"job-{at}" for at in range(len(jobs))]
        for folder in folders:
            folder.mkdir()
        commands = [[*([sys.executable] if job.script.suffix == ".py" else []), job.script, *job.arguments, *more] for job in jobs]
        with jobs_in_pools(binaries / "sluice", jobs[0].backend, runtime, [
                ([*job.pool, "--require-pool"], [*command, "--until", folder / "enough", "--out", folder / "disturbed.json"])
                for job, command, folder in zip(jobs, commands, folders, strict=True)], environment()) as training:
            handovers = list(at_once.map(lambda each: _disturb(*each, demands, seed, binaries, runtime),
                                         zip(jobs, training, folders, strict=True)))
        return list(at_once.map(_outcome, commands, folders, handovers))


def _disturb(job: Job, training: subprocess.Popen, folder: Path, demands: int, seed: int, binaries: Path,
             runtime: Path) -> list[dict]:
    """Takes memory from the job so often, and lets it end; what each handover took. Raises RuntimeError if one of them fails."""
    servers = served(training, [
        [binaries / "sluice-bench-handover", "--runtime-dir", runtime, "--bytes", str(job.demand_bytes),
         "--count", str(demands), "--delay-ms", str(job.most_delay_ms), "--seed", str(seed + at), "--range",
         *(["--paused"] if job.paused else []), *(["--device", str(job.devices[at])] if job.devices else [])]
        for at in range(len(job.devices) or 1)], {**environment(), "SLUICE_BROKER": str(binaries / "sluice")})
    (folder / "enough").touch()
    try:
        ended = f"ended with {training.wait(600)}"
    except subprocess.TimeoutExpired:
        ended = "has not ended"
    if training.returncode != 0 or any(server.returncode for server in servers):
        raise RuntimeError(f"training {ended}; {' '.join(server.stderr.strip() for server in servers)}")
    return [json.loads(line) for server in servers for line in server.stdout.splitlines()]


def _outcome(command: list, folder: Path, handovers: list[dict]) -> Outcome:
    """Trains undisturbed for as many steps."""
    disturbed = json.loads((folder / "disturbed.json").read_text())

    def train() -> dict:
        subprocess.run([*command, "--steps", str(disturbed["steps"]), "--out", folder / "undisturbed.json"],
                       env=environment(), check=True)
        return json.loads((folder / "undisturbed.json").read_text())

    undisturbed, runs = reference(train, disturbed)
    began = [begin for begin, _ in disturbed["phases"]]
    met = Counter(disturbed["phases"][bisect.bisect_right(began, handover["demanded_ns"]) - 1][1] for handover in handovers)
    return Outcome(disturbed, undisturbed, runs, met, handovers)


def of_pauses(outcome: Outcome, backend: str) -> tuple[dict[str, dict], dict[str, str]]:
    """What demands took while the job was paused, and what of it is asked for."""
    drains = [handover["gate_us"] + handover["drain_us"] for handover in outcome.handovers]
    longest = outcome.undisturbed["longest_operator_us"]
    metrics = {"latency_us": distribution(handover["latency_us"] for handover in outcome.handovers),
               "excess_us": distribution(handover["latency_us"] - handover["unit_us"] for handover in outcome.handovers),
               "drain_us": distribution(drains), "longest_operator_us": single(longest),
               "drain_beyond_operator_us": single(max(drains) - longest)}
    return metrics, {"drain_beyond_operator_us.value": f"<= {MOST_DRAIN_US}"} if backend == "host" else {"excess_us.p99": "<= 1000"}


def cell_of(job: Job, outcome: Outcome, demands: int, params: dict) -> Cell:
    """What the record says of a job after so many demands on each device."""
    in_all = demands * (len(job.devices) or 1)
    discards = outcome.disturbed["stats"]["discards"]
    metrics = {"equal_ratio": single(float(outcome.same), baseline="plain PyTorch, the same steps"),
               "demands_ratio": single(sum(outcome.demands.values()) / in_all),
               "steps": single(outcome.disturbed["steps"]),
               "undisturbed_runs": single(outcome.undisturbed_runs),
               "discards": single(sum(discards) if isinstance(discards, list) else discards)}
    if "in_vain" in outcome.disturbed:
        metrics |= {"optimizer_in_vain": single(outcome.disturbed["in_vain"]),
                    **{f"{phase}_demands_percent": single(100 * outcome.demands[phase] / in_all) for phase in PHASES}}
    targets = {"equal_ratio.value": ">= 1"}
    if job.paused:
        of_pause, asked = of_pauses(outcome, job.backend)
        metrics |= of_pause
        targets |= asked
    return Cell(params, metrics, targets)


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--demands", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[], help="these, on a GPU, instead of a small network")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[], help="jobs of several ranks instead")
    parser.add_argument("--beside", action="store_true", help="two jobs of several ranks at once, in one runtime folder")
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=[], help="these, paused with each demand, instead")
    parser.add_argument("--layers", choices=LAYERS, default="plain", help="of shards")
    parser.add_argument("--through-checkpoints", action="store_true",
                        help="after each step what jobs of several ranks have learned goes through a checkpoint")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    if args.kinds != ["shards"] and args.layers != "plain":
        parser.error(f"--layers {args.layers} is for --kinds shards")
    if not args.kinds and args.through_checkpoints:
        parser.error("--through-checkpoints is for --kinds")
    if args.beside and (not args.kinds or args.through_checkpoints):
        parser.error("--beside is for --kinds, and not with --through-checkpoints")
    clear_up_on_sigterm()
    job = HOST if args.backend == "host" else CUDA
    cells: list[Cell] = []
    ways = {"none": (), "2 forked": ("--workers", "2", "--start-method", "fork"),
            "2 spawned": ("--workers", "2", "--start-method", "spawn")}
    if args.backend == "cuda":
        ways["none, hooked optimizer"] = ("--hooked",)
    gpus = torch.cuda.device_count() if args.backend == "cuda" else 0
    more_of_ranks: tuple[str, ...] = ("--layers", args.layers)
    params_of_ranks = {} if args.layers == "plain" else {"layers": args.layers}
    if args.through_checkpoints:
        checkpoints = tempfile.TemporaryDirectory(prefix="sluice-exact-")
        more_of_ranks += ("--through", checkpoints.name)
        params_of_ranks["through"] = "checkpoints"
    places = 2 if args.beside else 1
    if args.beside:
        params_of_ranks["jobs_at_once"] = places
    runs = [("none", [of_ranks(kind, gpus, place) for place in range(places)], more_of_ranks,
             {"kind": kind, "ranks": KINDS[kind].ranks} | params_of_ranks) for kind in args.kinds]
    runs += [("none", [MODELS[name]], (), {"model": name}) for name in args.models]
    runs += [("none", [of_loop(name, args.backend)], (), {"loop": name, "paused": "with each demand"}) for name in args.loops]
    runs = runs or [(label, [job], more, {}) for label, more in ways.items()]
    used = [device for _, jobs, _, _ in runs for job in jobs for device in job.devices]
    gpus = 0 if args.backend == "host" else max(used, default=0) + 1
    for label, jobs, more, params in runs:
        of_run = []
        for place, outcome in enumerate(compare_beside(jobs, args.demands, args.seed, ROOT / "build" / args.preset / "bin", more)):
            print(f"{params or label}: {outcome}", file=sys.stderr, flush=True)
            of_job = params | ({"job": place} if args.beside else {})
            of_job |= {"workers": label, "demands": args.demands, "seed": args.seed}
            of_run.append(cell_of(jobs[place], outcome, args.demands, of_job))
        write("exactness", of_run, gpus=gpus, accumulate=True)  # at once: what comes after it may fail
        cells += of_run
    return 0 if all(all(cell.met().values()) for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
