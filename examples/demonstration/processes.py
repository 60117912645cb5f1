"""Starting programs, waiting for them with a deadline, and leaving none behind."""

import contextlib
import ctypes
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
GRACE_SECONDS = 10.0
libc = ctypes.CDLL(None)


class Failed(Exception):
    """The demonstration cannot go on; the message says what went wrong and where the log is."""


def descendants() -> set[int]:
    """All processes below this one. Orphans among them are our children, since we are their subreaper."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {os.getpid()} and pid not in found}:
        found |= more
    return found


def end_descendants() -> None:
    """Kills every process below this one, however it detached itself."""
    while left := descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # its parent was killed a moment ago
                os.waitpid(pid, 0)


def die_with_us() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def has_cuda() -> bool:
    """Whether a CUDA driver answers for at least one GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def usable_port(wanted: int) -> int:
    """`wanted` if it can be listened on, else 0, which lets the server take any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
            return wanted
        except OSError:
            return 0


def last_lines(file: Path, count: int = 12) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(f"    | {line}" for line in file.read_text(errors="replace").splitlines()[-count:])
    return ""


class Stage:
    """A pool of its own, and the programs around it. Leaving it ends them all.

        with Stage(sluice, folder) as stage:
            url = stage.serve(policy, port=8000)
            training = stage.start("training", [sluice, "run", …])
            stage.wait(training, seconds=60)

    Each program's output goes to FOLDER/NAME.log. Signals that a terminal sends reach this process only, which then
    ends the others; should it be killed, its children are told to end.
    """

    def __init__(self, sluice: Path, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.sluice, self.folder = sluice, folder
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self._names: dict[int, str] = {}
        self._running: list[subprocess.Popen] = []

    def __enter__(self) -> "Stage":
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not below `folder`: the address of a Unix socket has room for 107 characters.
        self.runtime = Path(tempfile.mkdtemp(prefix="sluice-"))
        self._environment["SLUICE_RUNTIME_DIR"] = str(self.runtime)
        return self

    def __exit__(self, *_why: object) -> None:
        for process in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        end_descendants()
        for process in self._running:
            process.poll()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(BrokenPipeError):  # what it was still to be told
                    pipe.close()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def start(self, name: str, command: list, captured: bool = False, fed: bool = False) -> subprocess.Popen:
        """Starts a program. With `captured`, its standard output is a pipe instead of going to its log; with `fed`, its
        standard input is a pipe instead of empty."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.PIPE if fed else subprocess.DEVNULL,
                stdout=subprocess.PIPE if captured else log, stderr=log, env=self._environment,
                start_new_session=True, preexec_fn=die_with_us)
        self._names[process.pid] = name
        self._running.append(process)
        return process

    def failure(self, process: subprocess.Popen, what: str) -> Failed:
        name = self._names[process.pid]
        log = self.folder / f"{name}.log"
        return Failed(f"{name} {what}; its log is {log}\n{last_lines(log)}".rstrip())

    def wait(self, process: subprocess.Popen, seconds: float) -> None:
        """Waits for a program's end. Throws `Failed` if that is not in time, or not with status 0."""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(process, f"did not end within {seconds:.0f} s") from None
        if status != 0:
            raise self.failure(process, f"ended with status {status}")

    def output(self, process: subprocess.Popen, seconds: float) -> str:
        """Waits for a captured program's end and returns what it wrote."""
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(process, f"did not end within {seconds:.0f} s") from None
        if process.returncode != 0:
            raise self.failure(process, f"ended with status {process.returncode}")
        return text.decode()

    def serve(self, policy: Path, port: int, seconds: float = 60.0) -> str:
        """Starts the server and returns its URL once it listens."""
        server = self.start("server", [self.sluice, "serve", "--policy", policy, "--port", usable_port(port)],
                            captured=True)
        deadline, text = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(server.stdout, selectors.EVENT_READ)
            while not (said := re.search(rb"listening on (http://\S+)\n", text)):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.failure(server, f"did not listen within {seconds:.0f} s")
                more = os.read(server.stdout.fileno(), 4096)
                if not more:
                    raise self.failure(server, f"ended with status {server.wait(GRACE_SECONDS)}")
                text += more
        return said.group(1).decode()

    def status(self) -> dict:
        """What `sluice status --json` says."""
        try:
            asked = subprocess.run([str(self.sluice), "status", "--json"], env=self._environment, capture_output=True,
                                   timeout=GRACE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as failure:
            raise Failed(f"sluice status cannot be run: {failure}") from None
        if asked.returncode != 0:
            raise Failed(f"sluice status ended with status {asked.returncode}: "
                         f"{asked.stderr.decode(errors='replace').strip()}")
        return json.loads(asked.stdout)
