"""`sluice run` where little is to be had: few open files, small files, little address space, closed standard
streams. Either there is a pool, or the terminal is told what is wrong and what would be right."""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap

import pytest
from patience import PATIENCE_SECONDS

from launching import POOL, SHOW_ENVIRONMENT, call, in_python, run

STATUS = ["status", "--json"]
JOINS = in_python("""
    import ctypes, os, sys
    library = ctypes.CDLL(os.environ["SLUICE_RUNTIME_LIBRARY"])
    library.sluice_last_error.restype = ctypes.c_char_p
    joined = library.sluice_join_host()
    print("joined" if joined == 0 else library.sluice_last_error().decode())
    """)


def limited(which, most):
    """For `preexec_fn`: limits the program and whatever it starts."""
    return lambda: resource.setrlimit(which, (most, most))


@pytest.mark.parametrize("files", [24, 32, 48, 64, 100, 256])
def test_a_job_joins_however_few_files_it_may_open(sluice, files):
    done = run(sluice, JOINS, ["--require-pool"], preexec_fn=limited(resource.RLIMIT_NOFILE, files))
    assert (done.returncode, done.stdout) == (0, "joined\n"), done.stderr


@pytest.mark.parametrize("files", [8, 12, 16, 20])
def test_a_broker_that_may_open_too_few_files_is_not_started(sluice, files):
    """Who comes later would be told of a limit that is not his."""
    done = run(sluice, ["true"], ["--require-pool"], preexec_fn=limited(resource.RLIMIT_NOFILE, files))
    assert done.returncode == 125
    assert f"a broker that may open {files} files (ulimit -Hn)" in done.stderr and "needs 24" in done.stderr, done.stderr
    assert run(sluice, JOINS, ["--require-pool"]).stdout == "joined\n"


def test_a_broker_raises_its_own_limit(sluice):
    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    assert run(sluice, JOINS, ["--require-pool"], preexec_fn=few).stdout == "joined\n"


def test_more_jobs_than_the_broker_has_files_for_are_turned_away_with_a_reason(sluice, monkeypatch):
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000")
    few = limited(resource.RLIMIT_NOFILE, 24)
    assert run(sluice, ["true"], ["--require-pool"], preexec_fn=few).returncode == 0
    nested = [str(sluice), "status", "--json"]
    for _ in range(12):  # each keeps a connection
        nested = [str(sluice), "run", *POOL, "--require-pool", "--", *nested]
    done = call(*nested)
    assert done.returncode == 125
    assert re.search(r"the broker, process \d+, may open 24 files .ulimit -Hn., and a process in the pool takes 5", done.stderr), done.stderr
    assert "the program that starts the broker" in done.stderr
    assert json.loads(call(sluice, *STATUS).stdout)["pool"]["free_bytes"] == 16 << 20


def test_too_small_files_are_told_on_the_terminal(sluice):
    done = run(sluice, ["true"], ["--require-pool"], preexec_fn=limited(resource.RLIMIT_FSIZE, 64 << 10))
    assert done.returncode == 125
    assert "File too large; the limit of a file's size (ulimit -f) holds for shared memory too: raise it" in done.stderr


@pytest.mark.parametrize("megabytes", [8, 16, 24, 32, 64, 256])
def test_a_launcher_with_little_address_space_has_a_pool_or_says_why_not(sluice, megabytes):
    done = run(sluice, JOINS, ["--require-pool"], preexec_fn=limited(resource.RLIMIT_AS, megabytes << 20))
    assert done.stdout == "joined\n" or "(ulimit -v)" in done.stdout or (done.returncode != 0 and done.stderr), done


@pytest.mark.parametrize("which, room", [("RLIMIT_AS", 8 << 20), ("RLIMIT_NOFILE", 1)])
@pytest.mark.parametrize("required", [True, False])
def test_a_job_that_cannot_join_trains_only_where_no_pool_is_required(sluice, tmp_path, which, room, required):
    """It is its own limit that is too small: the launcher found the pool."""
    mark = tmp_path / "trained"
    train = textwrap.dedent(f"""
        import os, re, resource, torch, sluice
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        now = {{"RLIMIT_AS": int(re.search(r"VmSize:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10,
               "RLIMIT_NOFILE": len(os.listdir("/proc/self/fd"))}}
        most = now["{which}"] + {room}
        resource.setrlimit(resource.{which}, (most, most))
        step = sluice.Step(model, optimizer, micro_batch=2)
        open({str(mark)!r}, "w").close()
        """)
    done = run(sluice, [sys.executable, "-c", train], ["--require-pool"] if required else [], timeout=PATIENCE_SECONDS)
    assert done.returncode == (125 if required else 0), done.stderr
    assert mark.exists() != required
    assert ("since --require-pool forbids it" if required else "trains without sharing") in done.stderr


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_standard_streams_may_be_closed(sluice, tmp_path, closed):
    """As in daemons. The command finds them closed, as it would without Sluice, and there is a pool."""
    said = tmp_path / "said"
    command = in_python(f"""
        import ctypes, json, os
        open_ones = []
        for fd in range(3):
            try:
                os.fstat(fd)
                open_ones.append(fd)
            except OSError:
                pass
        library = ctypes.CDLL(os.environ.get("SLUICE_RUNTIME_LIBRARY", ""))
        joined = library.sluice_join_host()
        with open({str(said)!r}, "w") as file:
            json.dump([open_ones, joined], file)
        """)
    words = " ".join(f"{fd}>&-" if fd else "0<&-" for fd in closed)
    line = f'exec "$0" "$@" {words}'
    done = subprocess.run(["sh", "-c", line, str(sluice), "run", *POOL, "--require-pool", "--", *command],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    # The interpreter opens none that is closed.
    assert json.loads(said.read_text()) == [[fd for fd in range(3) if fd not in closed], 0]


def test_a_broker_that_cannot_even_begin_is_told_with_its_last_words(sluice, tmp_path, runtime_folder, monkeypatch):
    broker = tmp_path / "broker"
    broker.write_text("#!/bin/sh\necho the library libfoo.so is missing >&2\nexit 127\n")
    broker.chmod(0o755)
    job = in_python("""
        import ctypes, os
        library = ctypes.CDLL(os.environ["SLUICE_RUNTIME_LIBRARY"])
        library.sluice_last_error.restype = ctypes.c_char_p
        library.sluice_join_host()
        print(library.sluice_last_error().decode())
        """)
    seen = json.loads(run(sluice, SHOW_ENVIRONMENT).stdout)
    other = tmp_path / "r"
    environment = os.environ | {"SLUICE_RUNTIME_LIBRARY": seen["SLUICE_RUNTIME_LIBRARY"], "SLUICE_RUN": "1",
                                "SLUICE_RUNTIME_DIR": str(other), "SLUICE_BROKER": str(broker)}
    done = call(*job, env=environment)
    assert "the broker ended before it was ready, with exit code 127: the library libfoo.so is missing; see " in done.stdout
    broker.write_text("#!/bin/sh\nkill -XFSZ $$\n")
    done = call(*job, env=environment)
    assert "by signal 25 (File size limit exceeded), and left no word in " in done.stdout
