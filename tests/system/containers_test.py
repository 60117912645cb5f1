"""Processes of several namespaces of pids share a pool by their runtime folder, as containers do: none sees the others'
pids, and a pid of one may be another process's in the next. The namespaces are made by `unshare`."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS, reaches

from launching import POOL, call, in_python, run, running


def may_unshare() -> bool:
    return subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False,
                          stderr=subprocess.DEVNULL).returncode == 0


pytestmark = pytest.mark.skipif(not may_unshare(), reason="needs to be root: makes namespaces of pids")

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
# Joins, and has a forked child that could reach the pool, as data workers are.
JOB = in_python("""
    import ctypes, os, sys, time
    library = ctypes.CDLL(os.environ["SLUICE_RUNTIME_LIBRARY"])
    library.sluice_last_error.restype = ctypes.c_char_p
    joined = library.sluice_join_host()
    worker = os.fork()
    if worker == 0:
        time.sleep(600)
    print("ready" if joined == 0 else library.sluice_last_error().decode(), os.getpid(), flush=True)
    sys.stdin.readline()
    """)


@contextlib.contextmanager
def container(sluice, *, name, command=JOB):
    """A job in a container of its own, once it has joined."""
    process = subprocess.Popen([*CONTAINER, str(sluice), "run", *POOL, "--require-pool", "--name", name, "--", *command],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready"), (line, process.communicate(timeout=PATIENCE_SECONDS)[1])
        process.own_pid = int(line.split()[1])
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def host(sluice, monkeypatch):
    """A broker outside of the containers."""
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "20000")
    assert run(sluice, ["true"], ["--require-pool"]).returncode == 0


def clients(sluice) -> dict[str, dict]:
    done = call(sluice, "status", "--json")
    return {each["name"]: each for each in json.loads(done.stdout)["clients"]} if done.returncode == 0 else {}


def broker(sluice) -> int:
    """Its pid as this process sees it: all namespaces lie below its own."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if words[1:2] == [b"broker"] and os.environ["SLUICE_RUNTIME_DIR"].encode() in words:
                return int(folder.name)
    return 0


def namespace_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def test_jobs_in_containers_share_the_hosts_pool_and_are_told_apart(sluice, host):
    with container(sluice, name="a") as one, container(sluice, name="b") as other:
        seen = clients(sluice)
        assert (seen["a"]["pid"], seen["b"]["pid"]) == (one.own_pid, other.own_pid)
        spaces = {each["pid_namespace"] for each in seen.values()}
        assert len(spaces) == 2 and None not in spaces and namespace_of(os.getpid()) not in spaces
        one.communicate("\n", timeout=PATIENCE_SECONDS)
        assert one.returncode == 0
        assert reaches(lambda: list(clients(sluice)) == ["b"])
    assert reaches(lambda: not clients(sluice))


def test_a_job_outside_shares_the_pool_of_a_broker_in_a_container(sluice):
    """Which sees no pid of it at all."""
    with container(sluice, name="inside"), running(sluice, JOB, ["--name", "outside"]) as outside:
        assert namespace_of(broker(sluice)) != namespace_of(os.getpid())
        seen = clients(sluice)
        assert seen["outside"]["pid_namespace"] == namespace_of(os.getpid())
        assert seen["inside"]["pid_namespace"] is None
        outside.communicate("\n", timeout=PATIENCE_SECONDS)
        assert reaches(lambda: list(clients(sluice)) == ["inside"])


def test_containers_beside_each_other_share_a_pool(sluice):
    with container(sluice, name="a"), container(sluice, name="b") as other:
        assert set(clients(sluice)) == {"a", "b"}
        other.kill()  # with all that is in it, as a container's end
        assert reaches(lambda: list(clients(sluice)) == ["a"])


def test_a_container_needs_no_more_than_the_folder_at_any_path(sluice, host, runtime_folder, tmp_path):
    """Its network, its IPC, its /dev/shm (which is tiny), its host name are its own."""
    inside = tmp_path / "inside"
    inside.mkdir()
    words = " ".join(["exec", str(sluice), "run", *POOL, "--require-pool", "--name", "a", "--", '"$@"'])
    setup = f"mount --bind {runtime_folder} {inside} && mount -t tmpfs -o size=4k none /dev/shm && " \
            f"mount -t tmpfs -o ro none {runtime_folder} && SLUICE_RUNTIME_DIR={inside} {words}"
    done = subprocess.Popen([*CONTAINER, "--ipc", "--net", "--uts", "sh", "-ec", setup, "sh", *JOB], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert done.stdout.readline().startswith("ready"), done.communicate(timeout=PATIENCE_SECONDS)[1]
        assert clients(sluice)["a"]["pid_namespace"] is not None
        assert done.communicate("\n", timeout=PATIENCE_SECONDS) and done.returncode == 0
    finally:
        done.kill()
        done.communicate()


def test_a_container_with_users_of_its_own_shares_if_its_user_is_the_brokers(sluice, host):
    words = [*CONTAINER[:-1], "--user", "--map-root-user", str(sluice), "run", *POOL, "--require-pool", "--", "true"]
    assert call(*words).returncode == 0


def test_a_container_of_another_user_is_refused(sluice, host):
    words = [*CONTAINER, "setpriv", "--reuid", "4711", "--clear-groups", str(sluice), "run", *POOL, "--require-pool", "--", "true"]
    done = call(*words)
    assert done.returncode == 125
    assert "belongs to user 0, and must be yours" in done.stderr


def test_jobs_outlive_brokers_wherever_the_next_one_begins(sluice):
    """Whose ledger names processes that it does not see: each keeps its place, and nobody's processes are ended."""
    outside = running(sluice, JOB, ["--name", "outside"])
    with container(sluice, name="a"), container(sluice, name="b"), outside as launcher:
        before = clients(sluice)
        assert set(before) == {"a", "b", "outside"}
        spaces = set()
        for _ in range(8):
            old = broker(sluice)
            spaces.add(namespace_of(old))
            os.kill(old, signal.SIGKILL)
            assert reaches(lambda: broker(sluice) not in (0, old) and set(clients(sluice)) == set(before))
            now = clients(sluice)
            assert {name: each["slot"] for name, each in now.items()} == {name: each["slot"] for name, each in before.items()}
        print(f"brokers in {len(spaces)} namespaces")
        launcher.communicate("\n", timeout=PATIENCE_SECONDS)  # which ends its worker: a broker in a container does not see it


def test_a_job_that_died_with_its_broker_is_cleaned_up_after_from_another_container(sluice):
    """The next broker sees neither its pid nor its children; the lock of its place tells that all of them have ended."""
    with container(sluice, name="a") as first:
        space = namespace_of(broker(sluice))
        with container(sluice, name="b"):
            assert set(clients(sluice)) == {"a", "b"}
            first.kill()  # the broker is in it
            assert reaches(lambda: list(clients(sluice)) == ["b"])
            assert namespace_of(broker(sluice)) != space
