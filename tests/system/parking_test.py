"""A program that knows nothing of Sluice is parked under `sluice run`, over the fake driver: whatever others do meanwhile, and
whoever is killed, what its memory holds is right."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("parking_job.py")
MIB = 1 << 20
CHUNK = 64 * MIB
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "8"))
KILLS = int(os.environ.get("SLUICE_TEST_KILLS", "12"))


def eventually(holds, patience: float = 30.0):
    """The first true result of `holds`."""
    deadline = time.monotonic() + patience
    while not (found := holds()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


class Lines:
    """What a process prints, as it comes."""

    def __init__(self, process: subprocess.Popen):
        self.found: list[str] = []
        self.reader = threading.Thread(target=self._read, args=(process,))
        self.reader.start()

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.found.append(line)


class Process:
    def __init__(self, command: list, environment: dict):
        self.process = subprocess.Popen([*map(str, command)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        self.lines = Lines(self.process)
        self.complaints = ""
        self.listener = threading.Thread(target=self._listen)
        self.listener.start()

    def _listen(self) -> None:
        self.complaints = self.process.stderr.read()

    def end(self, how: int = signal.SIGKILL) -> None:
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(60)
        self.lines.reader.join(60)
        self.listener.join(60)

    def result(self) -> dict:
        """Of a job, which is to end now."""
        self.process.stdin.close()
        self.process.wait(60)
        self.end()
        assert self.process.returncode == 0, self.complaints
        return json.loads(self.lines.found[-1])


class Parker(Process):
    def acquisitions(self) -> list[dict]:
        return [json.loads(line) for line in list(self.lines.found) if line.endswith("\n")]

    def taken(self) -> int:
        return sum(one.get("reclaimed", 0) > 0 for one in self.acquisitions())


class Pool:
    """Ten chunks and as many host copies."""

    def __init__(self, sluice, build, folder):
        self.sluice, self.build = sluice, build
        folder.mkdir(mode=0o700)
        self.environment = {**os.environ, "SLUICE_RUNTIME_DIR": str(folder), "LD_LIBRARY_PATH": str(build / "lib" / "fake_driver"),
                            "SLUICE_BROKER": str(sluice)}
        self.processes: list[Process] = []

    def job(self, mib: int, *options: str, host_memory: str = "640MiB", seed: int = 0, **environment: str) -> Process:
        made = Process([self.sluice, "run", "--backend", "cuda", "--memory", "640MiB", "--host-memory", host_memory, "--require-pool",
                        *options, "--", sys.executable, "-S", JOB, mib, seed], {**self.environment, **environment})
        self.processes.append(made)
        eventually(lambda: "ready\n" in made.lines.found or made.process.poll() is not None)
        assert made.process.poll() is None, made.complaints
        return made

    def parker(self, least: int, most: int = 0, count: int = 1_000_000, hold_ms: int = 10, apart_ms: int = 20, seed: int = 1,
               options: tuple = ()) -> Parker:
        made = Parker([self.build / "bin" / "sluice-bench-parker", "--least", least, "--most", most or least, "--count", count,
                       "--hold-ms", hold_ms, "--apart-ms", apart_ms, "--seed", seed, *options], self.environment)
        self.processes.append(made)
        return made

    def status(self) -> dict:
        done = subprocess.run([self.sluice, "status", "--json"], env=self.environment, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def clients(self, kind: str = "training") -> list[dict]:
        return [one for one in self.status().get("clients", []) if one["kind"] == kind]

    def await_parkable(self, jobs: int = 1) -> None:
        """Until the host copies are pinned."""
        eventually(lambda: len(found := self.clients()) == jobs and all(one["parking"]["parkable_bytes"] > 0 for one in found))

    def free_copies(self) -> int:
        return (self.status().get("pool", {}).get("host_copies") or {}).get("free_bytes", -1)

    def end(self) -> None:
        for each in self.processes:
            each.end()


@pytest.fixture
def pool(sluice, build, tmp_path):
    made = Pool(sluice, build, tmp_path / "runtime")
    yield made
    made.end()


def test_contents_are_right_whatever_is_taken(pool):
    job = pool.job(512)
    parker = pool.parker(3 * CHUNK, 10 * CHUNK)
    eventually(lambda: parker.taken() >= PARKS, 60.0 + PARKS)
    result = job.result()
    assert result["wrong pages"] == 0
    assert result["rounds"] > 0


def test_two_jobs_are_parked_for_one_server_and_both_come_back(pool):
    jobs = [pool.job(256, seed=seed) for seed in (1, 2)]
    parker = pool.parker(5 * CHUNK, 10 * CHUNK)
    eventually(lambda: parker.taken() >= PARKS, 60.0 + PARKS)
    assert all(one["parking"]["parks"] > 0 for one in pool.clients())
    for job in jobs:
        result = job.result()
        assert result["wrong pages"] == 0
        assert result["rounds"] > 0


def test_status_shows_what_is_parked_and_that_it_waits(pool):
    pool.job(512)
    pool.await_parkable()
    before = pool.clients()[0]
    assert before["kept_bytes"] == 8 * CHUNK, "nobody asks for it"
    assert before["parking"]["parkable_bytes"] == 8 * CHUNK
    parker = pool.parker(9 * CHUNK, hold_ms=3_600_000, count=1)
    parked = eventually(lambda: next((one for one in pool.clients() if one["parking"]["dirty_bytes"] == 7 * CHUNK), None))
    assert eventually(lambda: pool.clients()[0]["state"] == "waiting")
    assert parked["bytes"] == CHUNK
    assert parked["parking"]["dirty_bytes"] == 7 * CHUNK
    assert pool.free_copies() == 640 * MIB - 7 * CHUNK
    parker.end()
    back = eventually(lambda: next((one for one in pool.clients() if one["bytes"] == 8 * CHUNK and one["state"] == "running"), None))
    assert back["parking"]["parked_bytes"] == 0
    assert back["parking"]["parks"] == 1
    assert back["persistent_bytes"] == 8 * CHUNK
    assert pool.status()["pool"]["host_copies"]["free_bytes"] == 640 * MIB - 7 * CHUNK, "copies are kept until others need them"


def test_two_that_ask_without_end_leave_a_job_its_share(pool):
    """They hold what they have for an hour, unless it is owed to the job."""
    window_s, share = 2.0, 0.5
    job = pool.job(512)
    pool.await_parkable()
    parker = pool.parker(4 * CHUNK, hold_ms=3_600_000, apart_ms=0,
                         options=("--demanders", 2, "--gives-back", "--share", share, "--window-s", window_s, "--stay", 2))
    seen = []

    def parked_often_enough() -> bool:
        seen.extend(one["parking"] for one in pool.clients() if one["parking"]["window_ms"] == window_s * 1000)
        return bool(seen) and seen[-1]["parks"] >= PARKS and seen[-1]["parked_bytes"] == 0
    eventually(parked_often_enough, 60.0 + 10 * PARKS)
    parker.end()
    result = job.result()
    assert result["wrong pages"] == 0
    assert result["rounds"] > PARKS
    assert any(one["away_ms"] > 0 for one in seen)
    for one in seen:
        swap_ms = (one["out_us"] + one["in_us"]) / 1000 / max(1, one["parks"])
        # What it was late by, which the last that is away may be without its being known yet.
        late_ms = one["missed_us"] / 1000 + max(0.0, (one["waits_ms"] or 0.0) - (1 - share) * window_s * 1000)
        assert one["resident_ms"] >= share * window_s * 1000 - late_ms - 2 * swap_ms, one


def test_a_demand_that_meets_a_job_that_stays_is_refused_with_the_numbers(pool):
    job = pool.job(512)
    pool.await_parkable()
    parker = pool.parker(9 * CHUNK, hold_ms=0, apart_ms=0, options=("--stay", 1000))
    refused = eventually(lambda: next((one for one in parker.acquisitions() if "stays for another" in (one["refused"] or "")), None))
    pid = pool.clients()[0]["pid"]
    assert "576 MiB are wanted, of which 448 MiB are missing" in refused["refused"]
    assert f"pid {pid} (" in refused["refused"] and "could give 512 MiB, and stays for another" in refused["refused"]
    assert refused["retry_after_ms"] > 0
    assert pool.clients()[0]["parking"]["stays_ms"] > 0
    assert job.result()["wrong pages"] == 0


def test_no_other_job_gets_what_one_that_is_parked_needs(pool):
    first = pool.job(512)
    pool.await_parkable()
    parker = pool.parker(9 * CHUNK, hold_ms=3_600_000, count=1)
    eventually(lambda: any(one["parking"]["parked_bytes"] for one in pool.clients()))
    eventually(lambda: pool.clients("server")[0]["bytes"] == 9 * CHUNK)
    second = Process([pool.sluice, "run", "--backend", "cuda", "--memory", "640MiB", "--require-pool", "--", sys.executable, "-S", JOB,
                      192], pool.environment)
    pool.processes.append(second)
    eventually(lambda: len(pool.clients()) == 2)
    parker.end()
    assert first.result()["wrong pages"] == 0
    second.process.stdin.close()
    second.process.wait(60)
    second.end()
    # It had the two chunks that were nobody's, and the memory of the first once that had ended, or was told what there is.
    assert second.process.returncode == 0 or "this job holds" in second.complaints, second.complaints


@pytest.mark.parametrize("way", ["--park", "SLUICE_PARK"])
def test_who_is_not_to_be_parked_keeps_what_it_has(pool, way):
    job = pool.job(512, *(["--park", "never"] if way == "--park" else []), **({way: "never"} if way == "SLUICE_PARK" else {}))
    parker = pool.parker(3 * CHUNK)
    eventually(lambda: len(parker.acquisitions()) > 10)
    assert job.result()["wrong pages"] == 0
    assert all(one["refused"] for one in parker.acquisitions()[:10])
    assert "keeps 512 MiB" in parker.acquisitions()[0]["refused"]


def test_where_the_host_has_too_little_nothing_is_touched(pool):
    job = pool.job(512, host_memory="128MiB")
    pool.await_parkable()
    parker = pool.parker(5 * CHUNK)  # two are nobody's, and two could be copied
    eventually(lambda: len(parker.acquisitions()) > 3)
    assert parker.taken() == 0
    assert "keeps 384 MiB" in parker.acquisitions()[-1]["refused"]
    assert pool.clients()[0]["parking"]["parks"] == 0
    assert job.result()["wrong pages"] == 0


def test_whoever_is_killed_at_whatever_instant_the_others_go_on_and_nothing_is_lost(pool):
    """A job stays all along; another one, servers and brokers are killed at random instants."""
    chance = random.Random(7)
    survivor = pool.job(192, seed=3)
    parker = pool.parker(6 * CHUNK, 10 * CHUNK, seed=100)
    for number in range(KILLS):
        victim = chance.choice(["job", "server", "broker"])
        if victim == "job":
            other = pool.job(192, seed=10 + number)
            time.sleep(chance.uniform(0, 0.7))  # the instant
            pid = next(one["pid"] for one in pool.clients() if one["pid"] != survivor_pid(pool, survivor))
            os.kill(pid, signal.SIGKILL)
            other.end()
        elif victim == "server":
            before = parker.taken()
            eventually(lambda: parker.taken() > before or parker.process.poll() is not None or survivor.process.poll() is not None)
            time.sleep(chance.uniform(0, 0.1))
            parker.end()
            parker = pool.parker(6 * CHUNK, 10 * CHUNK, seed=101 + number)
        else:
            time.sleep(chance.uniform(0, 0.2))
            broker = pool.status().get("pool", {}).get("broker_pid")
            if broker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(broker, signal.SIGKILL)
    parker.end()
    eventually(lambda: all(one["parking"]["parked_bytes"] == 0 for one in pool.clients()) and len(pool.clients()) == 1)
    eventually(lambda: pool.free_copies() >= 640 * MIB - 3 * CHUNK)  # what it keeps itself
    status = pool.status()
    assert status["clients"][0]["bytes"] + status["pool"]["free_bytes"] + status["pool"]["dirty_bytes"] == 640 * MIB
    result = survivor.result()
    assert result["wrong pages"] == 0
    assert result["rounds"] > 0


def survivor_pid(pool: Pool, survivor: Process) -> int:
    """Of the job itself, which the launcher has become or started."""
    pids = {one["pid"] for one in pool.clients()}
    if survivor.process.pid in pids:
        return survivor.process.pid
    children = Path(f"/proc/{survivor.process.pid}/task/{survivor.process.pid}/children").read_text(encoding="ascii").split()
    return next(int(pid) for pid in children if int(pid) in pids)
