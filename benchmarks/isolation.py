"""Whether one side ever sees another's bytes: training goes on using what was taken from it, at thousands of handovers.

Every byte tells who wrote it. Two trainers write their own values all the time, also to addresses that have been taken
from them; the server looks whether its memory ever holds anything but its own value; training looks whether what it is
granted is zero. An engine, a third party in the same pool, grows, is parked by the server's demands and looks whether what
it is granted is zero, whether it keeps its own value, and that it reads nothing where it has no memory any more. On CUDA the driver has to refuse every copy from and to revoked addresses, and a kernel that touches one
has to end in CUDA_ERROR_ILLEGAL_ADDRESS, in its own process alone: fresh trainers do that one after the other.

    ./benchmarks/run.sh isolation [--seconds 480] [--resume]

With --seconds a run may end before it has all handovers; --resume then adds another run to the record's counts. Every
few seconds a line on standard error says how far it is, and what each process waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from brokers import clear_up_on_sigterm, end_broker

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS
#: What sluice-bench-isolation counts and nobody may ever see.
NEVER = ("foreign_bytes", "leaked_bytes", "probes_that_saw", "engine_foreign_bytes", "engine_leaked_bytes", "server_errors")
SUMMED = ("handovers", *NEVER, "checked_bytes", "granted_bytes", "probes", "refused", "revocations", "engine_checked_bytes",
          "engine_granted_bytes", "engine_probes", "engine_refused", "engine_parked", "faults")
PATIENCE = 60  # seconds that a process may get nowhere, and that it has to end
LOG_EVERY = 5.0  # seconds
SHOWN = 2000  # characters of what a process that failed has said


class Failed(RuntimeError):
    """A process failed or hung; the message has what all of them said."""


class Roles:
    """The processes of one run, each with what it writes in files of its own. Ends all of them at its exit."""

    def __init__(self, backend: str, binaries: Path, memory: int | None) -> None:
        self.pool = memory or (4 * MIB if backend == "host" else 32 * MIB)
        self._chunk = 32 << 10 if backend == "host" else 2 * MIB
        self._backend, self._binaries = backend, binaries
        self._environment = {**os.environ, "SLUICE_BROKER": str(binaries / "sluice"),
                             "SLUICE_BROKER_IDLE_EXIT_MS": "2000"}
        self._kept = tempfile.TemporaryDirectory(prefix="sluice-isolation-")
        self._folder = Path(self._kept.name)
        (self._folder / "counts").write_bytes(bytes(4096))
        self._processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_unused: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        try:
            end_broker(self._folder)
        except OSError:
            pass  # it never came up, or has gone
        self._kept.cleanup()

    def _command(self, role: str, *more: str) -> list:
        return [self._binaries / "sluice-bench-isolation", role, "--counts", self._folder / "counts", *more]

    def start(self, name: str, role: str, *more: str) -> None:
        """A process in the pool; another of the same name must have ended."""
        shared = ("--runtime-dir", str(self._folder), "--backend", self._backend, f"--memory={self.pool}",
                  f"--chunk={self._chunk}", f"--patience={PATIENCE}")
        with (self._folder / f"{name}.out").open("wb") as out, (self._folder / f"{name}.err").open("ab") as complaints:
            self._processes[name] = subprocess.Popen(self._command(role, *shared, *more), stdout=out, stderr=complaints,
                                                     env=self._environment)

    def report(self) -> dict:
        done = subprocess.run(self._command("report"), stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE)
        return json.loads(done.stdout)

    def await_end(self, timeout: float) -> None:
        """Returns when one of the living processes ends, or after so many seconds."""
        living = [os.pidfd_open(one.pid) for one in self._processes.values() if one.returncode is None]
        try:
            select.select(living, [], [], max(0.0, timeout))
        finally:
            for each in living:
                os.close(each)

    def result(self, name: str) -> int | None:
        """The exit status of a process, None while it lives. Raises Failed for any but 0."""
        status = self._processes[name].poll()
        if status:
            raise self.failure(f"the {name} ended with status {status}")
        return status

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text(encoding="utf-8").strip()

    def failure(self, what: str) -> Failed:
        """An error that shows what every process said last, and what it waits for."""
        lines = [what]
        doing = self.report()["doing"]
        for name, process in self._processes.items():
            status = process.poll()
            state = f"waits for {doing.get(name, 'nothing')}" if status is None else f"has ended with status {status}"
            lines += [f"the {name} {state}", *self._end_of(f"{name}.err")]
        return Failed("\n".join([*lines, "the broker's log:", *self._end_of("broker.log")]))

    def _end_of(self, file: str) -> list[str]:
        path = self._folder / file
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return ["    " + line for line in text[-SHOWN:].splitlines()]


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def progress(seconds: float, now: dict, handovers: int, faults: int) -> str:
    waits = ", ".join(f"{name}: {what}" for name, what in now["doing"].items())
    return (f"{seconds:.0f} s: {now['handovers']} of {handovers} handovers, {now['faults']} of {faults} faults, "
            f"{now['probes']} probes, {now['server_errors']} errors; waiting for: {waits}")


def measure(backend: str, handovers: int, faults: int, binaries: Path, memory: int | None = None,
            seconds: int | None = None) -> dict:
    """The counts of one run, `duration_s`, and `kernels`: how often each pair of results came (of a sound address, of a
    revoked one). It ends with so many handovers and faults, or after so many seconds.

    Raises Failed if a process fails, or gets nowhere for PATIENCE.
    """
    kernels: Counter = Counter()
    started = time.monotonic()
    with Roles(backend, binaries, memory) as roles:
        limit = [f"--seconds={seconds}"] if seconds else []
        roles.start("server", "server", f"--handovers={handovers}", f"--faults={faults}",
                    f"--bytes={roles.pool * 3 // 4}", *limit)
        trainers = [f"trainer {number}" for number in (0, 1)]
        for number, name in enumerate(trainers):
            roles.start(name, "trainer", f"--number={number}", f"--bytes={roles.pool * 3 // 8}")
        roles.start("engine", "engine", f"--bytes={roles.pool * 3 // 8}")
        tenants = [*trainers, "engine"]
        begun, faulting, logged = 0, "faulting trainer", started

        while roles.result("server") is None:
            now = time.monotonic()
            if seconds and now > started + seconds + PATIENCE:
                raise roles.failure(f"the server did not end within {PATIENCE} s of its time")
            if begun > kernels.total() and roles.result(faulting) is not None:
                kernels[roles.said(faulting)] += 1
            if begun == kernels.total() and begun < faults:
                roles.start(faulting, "fault", "--number=2", f"--bytes={roles.pool // 2}")
                begun += 1
            if now >= logged + LOG_EVERY:
                log(progress(now - started, roles.report(), handovers, faults))
                logged = now
            for name in tenants:
                if roles.result(name) is not None and not roles.report()["done"]:
                    raise roles.failure(f"the {name} ended before the server")
            roles.await_end(logged + LOG_EVERY - time.monotonic())

        # The server has told the others to end.
        until = time.monotonic() + PATIENCE
        others = tenants + ([faulting] if begun > kernels.total() else [])
        for name in others:
            while roles.result(name) is None:
                if time.monotonic() > until:
                    raise roles.failure(f"the {name} did not end within {PATIENCE} s of being told to")
                roles.await_end(until - time.monotonic())
        if begun > kernels.total() and (said := roles.said(faulting)):
            kernels[said] += 1
        counts = roles.report()
    del counts["doing"], counts["done"]
    return {**counts, "duration_s": time.monotonic() - started, "kernels": kernels,
            "faults": kernels[f"0 {ILLEGAL_ADDRESS}"]}


def earlier(params: dict, gpus: int) -> dict[str, float]:
    """What the record has of these parameters; raises SystemExit if that is of another tree."""
    from records import record_of, tree

    record = record_of("isolation", gpus=gpus)
    cell = next((cell for cell in record.get("cells", ()) if cell["params"] == params), None)
    if cell is None:
        return {}
    if {key: record[key] for key in ("commit", "dirty")} != tree() or record["dirty"]:
        raise SystemExit("isolation: the record is of another tree, or of one with changes; begin without --resume")
    return {name: metric["value"] for name, metric in cell["metrics"].items()}


def main() -> int:
    import torch
    from records import Cell, single, write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("host", "cuda"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--handovers", type=int, default=10_000)
    parser.add_argument("--faults", type=int, help="trainers whose kernel touches a revoked address; default: 20 on CUDA")
    parser.add_argument("--seconds", type=int, help="a run ends after so long, with fewer handovers")
    parser.add_argument("--resume", action="store_true", help="add to what the record has, until it has all handovers")
    parser.add_argument("--memory", type=int, help="bytes of the pool")
    parser.add_argument("--preset", default="release")
    args = parser.parse_args()
    clear_up_on_sigterm()
    gpus = 1 if args.backend == "cuda" else 0
    faults = (20 if gpus else 0) if args.faults is None else args.faults
    params = {"handovers": args.handovers, "faults": faults}
    before = earlier(params, gpus) if args.resume else {}
    left = {name: max(0, wanted - before.get(name, 0)) for name, wanted in params.items()}
    if before and not any(left.values()):
        print("isolation: the record has all of it", file=sys.stderr)
        return 0
    log(f"isolation: {left['handovers']} handovers and {left['faults']} faults on the {args.backend} backend")
    try:
        said = measure(args.backend, left["handovers"], left["faults"], ROOT / "build" / args.preset / "bin", args.memory,
                       args.seconds)
    except Failed as failure:
        print(f"isolation: {failure}", file=sys.stderr)
        return 1
    log(f"kernels on a sound and on a revoked address: {dict(said['kernels'])}")
    total = {name: said[name] + before.get(name, 0) for name in (*SUMMED, "duration_s")}
    metrics = {name: single(value) for name, value in total.items()} | {"runs": single(1 + before.get("runs", 0))}
    metrics["engine_refused_percent"] = single(100 * total["engine_refused"] / max(1, total["engine_probes"]))
    targets = {f"{name}.value": "<= 0" for name in NEVER} | {"handovers.value": f">= {args.handovers}",
                                                             "engine_refused_percent.value": ">= 100"}
    if gpus:
        metrics["refused_percent"] = single(100 * total["refused"] / total["probes"])
        targets |= {"refused_percent.value": ">= 100", "faults.value": f">= {faults}"}
    cell = Cell(params, metrics, targets)
    write("isolation", [cell], gpus=gpus)
    return 0 if all(cell.met().values()) else 1


if __name__ == "__main__":
    sys.exit(main())
