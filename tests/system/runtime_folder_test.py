"""Odd states of the runtime folder: each is put right, or refused with the command that mends it, by all commands alike."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import pytest
from patience import reaches

from launching import POOL, alive, call, run, running

AS_ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class State:
    make: Callable[[Path], None]  # of a folder that is not there yet
    refused: str = ""             # what all commands say; empty: it works
    root: bool = False            # can be made by root alone


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


def stale_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(made(folder) / "broker.sock"))


def with_file(name: str, text: str = ""):
    return lambda folder: (made(folder) / name).write_text(text) and None


def with_folder(name: str):
    return lambda folder: (made(folder) / name).mkdir()


def of_mode(mode: int):
    return lambda folder: made(folder).chmod(mode)


def another_users(folder: Path) -> None:
    os.chown(made(folder), 4711, 4711)


FOLDER = {
    "missing": State(lambda folder: None),
    "empty": State(lambda folder: made(folder) and None),
    "mode 0755": State(of_mode(0o755), r"has mode 0755, and must have 0700; run `chmod 0700 {}`"),
    "mode 0500": State(of_mode(0o500), r"has mode 0500, and must have 0700; run `chmod 0700 {}`"),
    "another user's": State(another_users, r"belongs to user 4711.* with `sudo chown -R \d+ {}`", root=True),
    "a file": State(lambda folder: folder.write_text("") and None, r"is not a folder; remove it with `rm {}`"),
    "a dangling link": State(lambda folder: folder.symlink_to("nowhere"), r"symbolic link.* with `rm {}`"),
    "a link": State(lambda folder: folder.symlink_to("/tmp"), r"symbolic link.* with `rm {}`"),
    "a socket that nobody listens at": State(stale_socket),
    "a file for a socket": State(with_file("broker.sock")),
    "a dangling link for a socket": State(lambda folder: (made(folder) / "broker.sock").symlink_to("nowhere")),
    "locks that nobody has": State(lambda folder: [(made(folder) / "broker.lock").touch(), (folder / "start.lock").touch()] and None),
    "a roster of nonsense": State(with_file("pool.json", '{"pools": [{"id": ')),
    "a roster of the dead": State(with_file("pool.json", '{"pools":[{"id":17,"clients":[{"pid":999999,"start":1}]}]}')),
    "a roster of an older version": State(with_file("pool.json", '{"pool": 17, "clients": "none"}')),
}
# What keeps a broker from starting: there is none to ask, and whoever would start one is told.
NO_BROKER = {
    "a folder for the socket": State(with_folder("broker.sock"), r"broker.sock is a folder; remove it with `rm -r {}/broker.sock`"),
    "a folder for the lock": State(with_folder("broker.lock"), r"broker.lock is a folder; remove it with `rm -r {}/broker.lock`"),
    "a link for the lock": State(lambda folder: (made(folder) / "broker.lock").symlink_to("nowhere"),
                                 r"broker.lock is a symbolic link; remove it with `rm -r {}/broker.lock`"),
    "a folder for the other lock": State(with_folder("start.lock"), r"start.lock is a folder; remove it with `rm -r {}/start.lock`"),
    "a folder for the log": State(with_folder("broker.log"), r"broker.log is a folder; remove it with `rm -r {}/broker.log`"),
}


@pytest.fixture
def folder(runtime_folder, monkeypatch):
    path = runtime_folder / "r"
    monkeypatch.setenv("SLUICE_RUNTIME_DIR", str(path))
    monkeypatch.setenv("SLUICE_BROKER_IDLE_EXIT_MS", "20000")
    return path


def said_by(sluice, *words) -> str:
    """What a command that fails says; empty for one that does not."""
    done = call(sluice, *words)
    return done.stderr if done.returncode else ""


STARTS = (["run", *POOL, "--require-pool", "--", "true"], ["broker", "--backend", "host", "--memory", str(16 << 20)])
ASKS = (["status"], ["pool", "show"], ["pool", "show", "--address", "0x1000"])


def mends(sentence: str) -> None:
    """Does what a refusal tells its reader to."""
    command = re.search(r"`([^`]+)`", sentence).group(1)
    subprocess.run(command.replace("sudo ", "").replace("rm ", "rm -f "), shell=True, check=True)


@pytest.mark.parametrize("state", FOLDER, ids=str)
def test_a_folder_in_any_state_works_or_is_refused_by_all_alike(sluice, folder, state):
    kind = FOLDER[state]
    if kind.root and not AS_ROOT:
        pytest.skip("needs to be root")
    kind.make(folder)
    if not kind.refused:
        assert "no broker runs in" in said_by(sluice, *ASKS[0])
        assert said_by(sluice, *STARTS[0]) == ""
        assert said_by(sluice, *ASKS[0]) == said_by(sluice, *ASKS[1]) == ""
        return
    told = kind.refused.format(re.escape(str(folder)))
    for words in (*STARTS, *ASKS):
        assert re.search(told, said_by(sluice, *words)), words
    mends(said_by(sluice, *ASKS[0]))
    assert said_by(sluice, *STARTS[0]) == ""


@pytest.mark.parametrize("state", NO_BROKER, ids=str)
def test_what_keeps_a_broker_from_starting_is_told_with_what_mends_it(sluice, folder, state):
    NO_BROKER[state].make(folder)
    told = NO_BROKER[state].refused.format(re.escape(str(folder)))
    said = said_by(sluice, *STARTS[0])
    assert re.search(told, said), said
    assert "no broker runs in" in said_by(sluice, *ASKS[0])
    mends(said)
    assert said_by(sluice, *STARTS[0]) == ""


@pytest.mark.skipif(not AS_ROOT, reason="needs to be root: mounts a file system")
def test_a_folder_that_cannot_be_written_is_told(sluice, folder, checkout):
    for options, reason in (("ro", "Read-only file system"), ("size=4k,nr_inodes=1", "No space left on device")):
        with contextlib.ExitStack() as at_end:
            made(folder)
            subprocess.run(["mount", "-t", "tmpfs", "-o", options + ",mode=700", "none", folder], check=True)
            at_end.callback(lambda: (subprocess.run(["umount", "-l", folder], check=True), folder.rmdir()))
            said = said_by(sluice, *STARTS[0])
            assert f"cannot write in the runtime folder {folder}: {reason}" in said
            assert "name a folder that you can write with --runtime-dir" in said
            assert "no broker runs in" in said_by(sluice, *ASKS[0])


def status(sluice) -> dict:
    return json.loads(call(sluice, "status", "--json").stdout)


def remove(folder: Path) -> None:
    """At once, so that nobody puts anything back into it amid that."""
    away = folder.with_name(folder.name + "-away")
    folder.rename(away)
    shutil.rmtree(away)


REMOVE = {
    "the socket": lambda folder: (folder / "broker.sock").unlink(),
    "the lock": lambda folder: (folder / "broker.lock").unlink(),
    "all files": lambda folder: [file.unlink() for file in folder.iterdir()],
    "the folder": remove,
}


@pytest.mark.parametrize("what", REMOVE, ids=str)
def test_a_broker_whose_place_is_removed_is_found_again(sluice, folder, what):
    """A cleaner of /tmp does that. New jobs find the same broker and pool, and so does whoever asks."""
    with running(sluice, ["sh", "-c", "echo ready; read line"]):
        before = status(sluice)["pool"]
        REMOVE[what](folder)
        after = json.loads(run(sluice, [str(sluice), "status", "--json"], ["--require-pool"]).stdout)["pool"] \
            if what == "the socket" else None
        assert reaches(lambda: call(sluice, "status").returncode == 0)
        assert status(sluice)["pool"]["broker_pid"] == before["broker_pid"]
        assert status(sluice)["pool"]["id"] == before["id"]
        assert after is None or after["broker_pid"] == before["broker_pid"]
        assert reaches((folder / "broker.lock").exists)


def test_a_broker_whose_folder_is_removed_and_that_nobody_needs_ends(sluice, folder):
    assert said_by(sluice, *STARTS[0]) == ""
    pid = status(sluice)["pool"]["broker_pid"]
    remove(folder)
    assert reaches(lambda: not alive(pid))
    assert not folder.exists()


def test_a_broker_that_holds_the_folder_and_does_not_listen_is_named_by_all_alike(sluice, folder):
    assert said_by(sluice, *STARTS[0]) == ""
    pid = status(sluice)["pool"]["broker_pid"]
    os.kill(pid, signal.SIGSTOP)
    (folder / "broker.sock").unlink()
    for words in (STARTS[0], *ASKS):
        said = said_by(sluice, *words)
        assert f"(pid {pid}) does not listen there; if it is stopped, let it go on with `kill -CONT {pid}`" in said
    mends(said)
    assert reaches(lambda: call(sluice, "status").returncode == 0)
    assert status(sluice)["pool"]["broker_pid"] == pid


def test_a_broker_that_is_stopped_is_said_to_be_so_and_how_it_goes_on(sluice, folder):
    assert said_by(sluice, *STARTS[0]) == ""
    pid = status(sluice)["pool"]["broker_pid"]
    os.kill(pid, signal.SIGSTOP)
    said = said_by(sluice, "status")
    assert f"(pid {pid}) does not answer: it is stopped (SIGSTOP, or a debugger), and `kill -CONT {pid}` lets it go on" in said
    mends(said)
    assert status(sluice)["pool"]["broker_pid"] == pid
