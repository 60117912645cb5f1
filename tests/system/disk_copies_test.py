"""What is parked beyond the memory of host copies lies on a disk, over the fake driver: whatever happens, what a job's memory holds is
right, or the job ends and says so."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
from launching import call
from parking_test import CHUNK, MIB, PARKS, pool  # noqa: F401
from patience import eventually

MEMORY, DISK = 2 * CHUNK, 6 * CHUNK


@pytest.fixture
def disk_pool(pool, disk_folder):  # noqa: F811
    pool.host_memory = f"{MEMORY // MIB}MiB"
    pool.disk = ("--host-disk", f"{DISK // MIB}MiB", "--host-disk-path", str(disk_folder))
    return pool


def copies_of(pool) -> dict:  # noqa: F811
    return pool.status().get("pool", {}).get("host_copies") or {}


def file_of(broker: int) -> Path:
    """By which its copies on disk can be reached, though they have no name."""
    for each in Path(f"/proc/{broker}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "sluice-host-copies-" in os.readlink(each):
                return each
    raise AssertionError("the broker has no file for host copies")


def test_contents_are_right_whatever_is_taken(disk_pool, disk_folder):
    job = disk_pool.job(512)
    parker = disk_pool.parker(3 * CHUNK, 10 * CHUNK)
    eventually(lambda: parker.taken() >= PARKS)
    assert not list(disk_folder.iterdir()), "it has no name"
    result = job.result()
    assert result["wrong pages"] == 0
    assert result["rounds"] > 0


def test_what_an_operator_parks_fills_memory_first_and_status_says_where_it_lies(disk_pool):
    job = disk_pool.job(512)
    disk_pool.await_parkable()
    assert disk_pool.clients()[0]["parking"]["parkable_bytes"] == 8 * CHUNK
    done = disk_pool.call("park", "training")
    assert "512 MiB are in host copies (384 MiB of it on disk)" in done.stdout, done.stderr
    parking = disk_pool.clients()[0]["parking"]
    assert parking["parked_bytes"] == parking["dirty_bytes"] == MEMORY + DISK
    assert parking["disk_bytes"] == DISK
    copies = copies_of(disk_pool)
    assert (copies["bytes"], copies["held_bytes"]) == (MEMORY, MEMORY)
    assert copies["disk"] == {"bytes": DISK, "free_bytes": 0, "held_bytes": DISK, "kept_bytes": 0, "damaged_bytes": 0}
    assert re.search(r"host copies: 128 MiB, 0 B free, 128 MiB of it present; on disk 384 MiB, 0 B free", disk_pool.call("pool", "show").stdout)
    assert re.search(r"zero +on disk +times.*\n.* 384 MiB ", disk_pool.call("status").stdout)
    assert disk_pool.call("wake", "training").returncode == 0
    eventually(lambda: disk_pool.clients()[0]["state"] == "running" and disk_pool.clients()[0]["bytes"] == 8 * CHUNK)
    assert disk_pool.clients()[0]["parking"]["disk_bytes"] == 0
    assert copies_of(disk_pool)["disk"]["held_bytes"] == 0
    assert job.result()["wrong pages"] == 0
    eventually(lambda: not disk_pool.clients() and copies_of(disk_pool).get("disk", {}).get("free_bytes", DISK) == DISK)


def test_what_fits_neither_memory_nor_disk_is_refused_with_both_before_anything_is_touched(disk_pool):
    disk_pool.disk = ("--host-disk", "128MiB", *disk_pool.disk[2:])
    job = disk_pool.job(512)
    disk_pool.await_parkable()
    parker = disk_pool.parker(7 * CHUNK)  # two are nobody's, and four could be copied
    eventually(lambda: len(parker.acquisitions()) > 3)
    assert parker.taken() == 0
    refused = parker.acquisitions()[-1]["refused"]
    assert "keeps 256 MiB" in refused
    assert "of those, 128 MiB of 128 MiB in memory and 128 MiB of 128 MiB on disk are free" in refused
    assert disk_pool.clients()[0]["parking"]["parks"] == 0
    assert copies_of(disk_pool)["disk"]["free_bytes"] == 2 * CHUNK
    assert job.result()["wrong pages"] == 0


def test_an_operator_is_told_both_numbers_when_both_are_full(disk_pool):
    disk_pool.disk = ("--host-disk", "128MiB", *disk_pool.disk[2:])
    first, second = disk_pool.job(256, "--name", "first"), disk_pool.job(128, "--name", "second", seed=4)
    disk_pool.await_parkable(2)
    assert disk_pool.call("park", "first").returncode == 0
    eventually(lambda: next(one for one in disk_pool.clients() if one["name"] == "second")["parking"]["parkable_bytes"] == 0)
    done = disk_pool.call("park", "second")
    assert "keeps 128 MiB, and of the 128 MiB of host copies 0 B are free, of the 128 MiB of them on disk 0 B are free" in done.stderr
    assert disk_pool.call("wake", "first").returncode == 0
    for job in (first, second):
        assert job.result()["wrong pages"] == 0


def test_the_next_broker_has_the_copies_on_disk(disk_pool):
    job = disk_pool.job(512)
    disk_pool.await_parkable()
    assert disk_pool.call("park", "training").returncode == 0
    broker = disk_pool.status()["pool"]["broker_pid"]
    os.kill(broker, signal.SIGKILL)
    eventually(lambda: disk_pool.status().get("pool", {}).get("broker_pid", broker) != broker and disk_pool.clients())
    assert copies_of(disk_pool)["held_bytes"] == MEMORY
    assert copies_of(disk_pool)["disk"]["held_bytes"] == DISK
    assert disk_pool.call("wake", "training").returncode == 0
    eventually(lambda: disk_pool.clients()[0]["state"] == "running")
    later = disk_pool.job(64, seed=8)
    assert disk_pool.call("park", disk_pool.clients()[0]["pid"]).returncode == 0, "who joins later has them, too"
    assert disk_pool.call("wake", disk_pool.clients()[0]["pid"]).returncode == 0
    for each in (job, later):
        assert each.result()["wrong pages"] == 0


def test_of_a_job_that_is_killed_nothing_is_left_there(disk_pool):
    job = disk_pool.job(512)
    keeper = disk_pool.job(64, seed=9)
    disk_pool.await_parkable(2)
    pid = next(one["pid"] for one in disk_pool.clients() if one["bytes"] == 8 * CHUNK)
    assert disk_pool.call("park", pid).returncode == 0
    assert copies_of(disk_pool)["disk"]["held_bytes"] == DISK
    os.kill(pid, signal.SIGKILL)
    job.end()
    eventually(lambda: copies_of(disk_pool)["disk"]["free_bytes"] == DISK and len(disk_pool.clients()) == 1)
    assert keeper.result()["wrong pages"] == 0


def test_a_job_that_cannot_write_there_loses_nothing_and_says_why(disk_pool):
    job = disk_pool.job(512)
    disk_pool.await_parkable()
    pid = disk_pool.clients()[0]["pid"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (CHUNK, CHUNK))  # the first of its slots there is all that it may write
    parker = disk_pool.parker(9 * CHUNK)
    refused = eventually(lambda: next((one["refused"] for one in parker.acquisitions() if one["refused"]), None))
    assert f"pid {pid} (" in refused
    assert "could not write to that disk, and uses it no more: File too large" in refused
    # It has no more than memory now, and nothing is demanded in vain.
    parking = eventually(lambda: (found := disk_pool.clients()[0]) and found["state"] == "running" and found["parking"])
    eventually(lambda: disk_pool.clients()[0]["parking"]["parkable_bytes"] == MEMORY)
    assert {"reason": "the disk of host copies failed", "bytes": DISK} in disk_pool.clients()[0]["parking"]["unparkable"]
    parks = disk_pool.clients()[0]["parking"]["parks"]
    tries = len(parker.acquisitions())
    eventually(lambda: len(parker.acquisitions()) > tries + 3)
    assert disk_pool.clients()[0]["parking"]["parks"] == parks, parking
    parker.end()
    assert "uses the disk of host copies no more, and loses nothing" in job.complaints
    other = disk_pool.parker(4 * CHUNK, count=1)
    eventually(lambda: other.taken() == 1)
    assert job.result()["wrong pages"] == 0


def test_a_job_whose_contents_cannot_be_read_ends_and_says_so(disk_pool):
    job = disk_pool.job(512)
    keeper = disk_pool.job(64, seed=9)
    disk_pool.await_parkable(2)
    pid = next(one["pid"] for one in disk_pool.clients() if one["bytes"] == 8 * CHUNK)
    assert disk_pool.call("park", pid).returncode == 0
    os.truncate(file_of(disk_pool.status()["pool"]["broker_pid"]), CHUNK)
    assert disk_pool.call("wake", pid).returncode == 0
    eventually(lambda: job.process.poll() is not None)
    job.end()
    assert job.process.returncode != 0
    assert "contents of this job's memory are lost, so it ends" in job.complaints
    assert "cannot read host copies from the disk: Input/output error" in job.complaints
    eventually(lambda: len(disk_pool.clients()) == 1)
    assert keeper.result()["wrong pages"] == 0


@pytest.mark.parametrize(("words", "complaint"), [
    (("--host-disk", "64MiB", "--host-disk-path", "{folder}/none"), "there is no folder {folder}/none; create it"),
    (("--host-disk", "64MiB", "--host-disk-path", "/dev/null"), "/dev/null is not a folder"),
    (("--host-disk", "1MiB", "--host-disk-path", "{folder}"), "1 MiB on disk, but one takes 2 MiB"),
    (("--host-disk", "{all}MiB", "--host-disk-path", "{folder}"), " on the disk of {folder}, where "),
    (("--host-disk", "64MiB"), "--host-disk requires --host-disk-path"),
    (("--host-disk-path", "{folder}"), "--host-disk-path requires --host-disk"),
])
def test_a_disk_that_will_not_do_is_refused_with_the_reason(sluice, tmp_path, disk_folder, words, complaint):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    of_disk = {"folder": disk_folder, "all": shutil.disk_usage(disk_folder).total // MIB}
    done = call(sluice, "run", "--backend", "host", "--memory", "256MiB", "--host-memory", "128MiB", *(word.format(**of_disk) for word in words), "--require-pool", "--runtime-dir", runtime, "--", "true")
    assert done.returncode != 0
    assert complaint.format(folder=disk_folder) in done.stderr
    assert not list(disk_folder.iterdir())


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no file system in memory")
def test_a_folder_in_memory_is_none(sluice, tmp_path):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    done = call(sluice, "run", "--backend", "host", "--memory", "64MiB", "--host-memory", "64MiB", "--host-disk", "64MiB",
                "--host-disk-path", "/dev/shm", "--require-pool", "--runtime-dir", runtime, "--", "true")
    assert done.returncode != 0
    assert "/dev/shm is in memory (tmpfs)" in done.stderr


def test_without_memory_there_is_no_disk_either(sluice, tmp_path, disk_folder):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    done = call(sluice, "run", "--backend", "host", "--memory", "64MiB", "--host-disk", "64MiB", "--host-disk-path", disk_folder,
                "--require-pool", "--runtime-dir", runtime, "--", "true")
    assert done.returncode != 0
    assert "on disk, but none in memory, which are used first" in done.stderr
