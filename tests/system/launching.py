"""What the tests of `sluice run` share."""

import contextlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

from patience import PATIENCE_SECONDS

POOL = ["--backend", "host", "--memory", "16MiB"]


def in_python(code: str) -> list[str]:
    """A command that runs `code` without site packages, so that it starts at once."""
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def call(program, *words, **how):
    """Runs a program to its end; its output is text."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": PATIENCE_SECONDS, **how}
    return subprocess.run([program, *words], text=True, check=False, **how)


def run(sluice, command, options=(), **how):
    """`sluice run` with a small pool on the host, to its end."""
    return call(sluice, "run", *POOL, *options, "--", *command, **how)


@contextlib.contextmanager
def running(sluice, command, options=(), **how):
    """The launcher, once its command has said "ready"."""
    process = subprocess.Popen(
        [sluice, "run", *POOL, *options, "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("ready"), process.communicate(timeout=PATIENCE_SECONDS)[1]
        process.first_line = line
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


SHOW_ENVIRONMENT = in_python("import json, os; print(json.dumps(dict(os.environ)))")


def environment_in(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
