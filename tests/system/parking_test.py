"""A program that knows nothing of Sluice is parked under `sluice run`, over the fake driver: whatever others do meanwhile, and
whoever is killed, what its memory holds is right."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS, eventually

JOB = Path(__file__).with_name("parking_job.py")
MIB = 1 << 20
CHUNK = 64 * MIB
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "8"))


def stop(pid: int) -> None:
    """Until no thread of it runs any more, which a busy machine takes a while for."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")),
               f"all threads of {pid} are stopped")


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
        for line in self.process.stderr:
            self.complaints += line

    def end(self, how: int = signal.SIGKILL) -> None:
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait(PATIENCE_SECONDS)
        self.lines.reader.join(PATIENCE_SECONDS)
        self.listener.join(PATIENCE_SECONDS)

    def result(self) -> dict:
        """Of a job, which is to end now."""
        self.process.stdin.close()
        self.process.wait(PATIENCE_SECONDS)
        self.end()
        assert self.process.returncode == 0, self.complaints
        return json.loads(self.lines.found[-1])


class Parker(Process):
    def acquisitions(self) -> list[dict]:
        return [json.loads(line) for line in list(self.lines.found) if line.endswith("\n")]

    def taken(self) -> int:
        return sum(one.get("reclaimed", 0) > 0 for one in self.acquisitions())


class Pool:
    """Ten chunks and as many host copies; processes have what is in `more` of their environment."""

    host_memory = "640MiB"
    disk: tuple = ()  # options of `sluice run`, for host copies beyond that

    def __init__(self, sluice, build, folder, **more: str):
        self.sluice, self.build = sluice, build
        folder.mkdir(mode=0o700)
        self.environment = {**os.environ, "SLUICE_RUNTIME_DIR": str(folder), "SLUICE_BROKER": str(sluice), **more}
        self.processes: list[Process] = []

    def job(self, mib: int, *options: str, host_memory: str = "", seed: int = 0, how: tuple = (), **environment: str) -> Process:
        made = Process([self.sluice, "run", "--backend", "cuda", "--memory", "640MiB", "--host-memory", host_memory or self.host_memory,
                        *self.disk, "--require-pool", *options, "--", sys.executable, "-S", JOB, mib, seed, *how], {**self.environment, **environment})
        self.processes.append(made)
        eventually(lambda: "ready\n" in made.lines.found or made.process.poll() is not None)
        assert made.process.poll() is None, made.complaints
        return made

    def parker(self, least: int, most: int = 0, count: int = 1_000_000, hold_ms: int = 10, apart_ms: int = 20, seed: int = 1,
               patience_s: int = 240, options: tuple = ()) -> Parker:
        made = Parker([self.build / "bin" / "sluice-bench-parker", "--least", least, "--most", most or least, "--count", count,
                       "--hold-ms", hold_ms, "--apart-ms", apart_ms, "--seed", seed, "--patience-s", patience_s, *options],
                      self.environment)
        self.processes.append(made)
        return made

    def call(self, *words) -> subprocess.CompletedProcess:
        return subprocess.run([self.sluice, *map(str, words)], env=self.environment, capture_output=True, text=True, check=False)

    def status(self) -> dict:
        done = self.call("status", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def clients(self, kind: str = "training") -> list[dict]:
        return [one for one in self.status().get("clients", []) if one["kind"] == kind]

    def await_parkable(self, jobs: int = 1) -> None:
        """Until the host copies are pinned."""
        eventually(lambda: len(found := self.clients()) == jobs and all(one["parking"]["parkable_bytes"] > 0 for one in found))

    def free_copies(self) -> int:
        return (self.status().get("pool", {}).get("host_copies") or {}).get("free_bytes", -1)

    def end(self) -> None:
        for each in reversed(self.processes):  # servers before the jobs that are parked for them
            each.end()


@pytest.fixture
def pool(sluice, build, tmp_path):
    made = Pool(sluice, build, tmp_path / "runtime", LD_LIBRARY_PATH=str(build / "lib" / "fake_driver"))
    yield made
    made.end()


def test_contents_are_right_whatever_is_taken(pool):
    job = pool.job(512)
    parker = pool.parker(3 * CHUNK, 10 * CHUNK)
    eventually(lambda: parker.taken() >= PARKS)
    result = job.result()
    assert result["wrong pages"] == 0
    assert result["rounds"] > 0


def test_jobs_end_well_whatever_is_being_taken_from_them_just_then(pool):
    """The fake driver, unlike real ones, always crashes when it goes down while a job's control thread is in it."""
    pool.environment["FAKE_CUDA_GOES_DOWN_MS"] = "200"
    job = pool.job(512)  # whose pool has host copies
    parker = pool.parker(64 * MIB, 640 * MIB, hold_ms=1, apart_ms=1)
    for seed in range(PARKS // 2):
        pool.await_parkable()
        before = parker.taken()
        eventually(lambda before=before: parker.taken() > before)
        assert job.result()["wrong pages"] == 0
        job = pool.job(512, seed=seed)


def test_a_job_ends_well_with_work_that_is_still_on_its_way_to_the_device(pool):
    """Calls that it has left to the gate's own thread, which is to be out of the driver when that goes down."""
    pool.environment.update(FAKE_CUDA_GOES_DOWN_MS="100", FAKE_CUDA_DELAY="cuMemsetD8Async:1000000", SLUICE_RUN_AHEAD_US="100")
    pool.job(512)
    pool.parker(64 * MIB, 640 * MIB, hold_ms=1, apart_ms=1)
    pool.await_parkable()
    for launches in (200, 20, 5000):  # the last are more than are made as it ends
        done = subprocess.run([pool.sluice, "run", "--backend", "cuda", "--memory", "640MiB", "--require-pool", "--", sys.executable, "-S",
                               JOB.with_name("ending_job.py"), str(launches)], env=pool.environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), launches


def test_what_a_program_makes_and_maps_itself_is_parked_as_well(pool):
    job = pool.job(460, how=("virtual",))  # its last chunk is not full
    pool.await_parkable()
    assert pool.clients()[0]["parking"]["parkable_bytes"] == 8 * CHUNK
    parker = pool.parker(5 * CHUNK, 10 * CHUNK, hold_ms=5)
    eventually(lambda: parker.taken() >= PARKS)
    result = job.result()
    assert result["wrong pages"] == 0
    assert result["rounds"] > 0


def test_the_pool_is_told_when_an_engines_device_works_and_when_it_rests(pool):
    command = [pool.sluice, "run", "--backend", "cuda", "--memory", "640MiB", "--require-pool", "--", "env", "SLUICE_ROLE=engine",
               sys.executable, "-S", JOB.with_name("working_engine.py")]
    engine = Process(command, pool.environment)
    pool.processes.append(engine)
    eventually(lambda: "ready\n" in engine.lines.found)

    def seen() -> dict:
        return pool.clients("engine")[0]

    def say() -> None:
        engine.process.stdin.write("\n")
        engine.process.stdin.flush()

    for turn in range(3):
        eventually(lambda: not seen()["works"])
        before = seen()["worked_us"]
        say()
        eventually(lambda: seen()["works"])
        say()
        eventually(lambda before=before: not seen()["works"] and seen()["worked_us"] > before)
        assert seen()["kind"] == "engine", turn
    say()
    eventually(lambda: seen()["works"])
    engine.end()
    eventually(lambda: all(one["state"] == "gone" for one in pool.clients("engine")))


def test_two_jobs_are_parked_for_one_server_and_both_come_back(pool):
    jobs = [pool.job(256, seed=seed) for seed in (1, 2)]
    parker = pool.parker(5 * CHUNK, 10 * CHUNK)
    eventually(lambda: parker.taken() >= PARKS)
    assert all(one["parking"]["parks"] > 0 for one in pool.clients())
    for job in jobs:
        result = job.result()
        assert result["wrong pages"] == 0
        assert result["rounds"] > 0


def test_programs_may_do_with_what_they_make_themselves_what_the_driver_allows(pool):
    done = subprocess.run([pool.sluice, "run", "--backend", "cuda", "--memory", "640MiB", "--require-pool", "--", sys.executable, "-S",
                           JOB.with_name("virtual_memory_job.py")], env=pool.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == {
        "made": 2, "range": True, "the same handle": True, "properties": [1, 1, 1, 0], "freed as cuMemAlloc's": 1, "a part of it": 1,
        "mapped there already": 1, "mapped elsewhere": 7, "released once more": 1, "released and mapped": [2, 7], "unmapped": 0,
        "addresses freed by another size": 1, "to be exported": 2, "exported": [0, 9, True], "exported, mapped again": 11,
        "parts": [20, 21, 22], "parts of the pool": 0, "after all": 0, "less than a chunk": 0, "too much": 2}


def test_status_shows_what_is_parked_and_that_it_waits(pool):
    pool.job(512)
    pool.await_parkable()
    before = pool.clients()[0]
    assert before["kept_bytes"] == 8 * CHUNK, "nobody asks for it"
    assert before["parking"]["parkable_bytes"] == 8 * CHUNK
    parker = pool.parker(9 * CHUNK, hold_ms=3_600_000, count=1)
    parked = eventually(lambda: next((one for one in pool.clients() if one["parking"]["dirty_bytes"] == 7 * CHUNK), None))
    assert parked["state"] == "parked"
    assert eventually(lambda: pool.clients()[0]["parking"]["wanted"])
    assert parked["bytes"] == CHUNK
    assert parked["parking"]["dirty_bytes"] == 7 * CHUNK
    assert pool.free_copies() == 640 * MIB - 7 * CHUNK
    parker.end()
    back = eventually(lambda: next((one for one in pool.clients() if one["bytes"] == 8 * CHUNK and one["state"] == "running"), None))
    assert back["parking"]["parked_bytes"] == 0
    assert back["parking"]["parks"] == 1
    recent = pool.status()["handovers"]["recent"][-1]
    assert recent["parked_bytes"] == 7 * CHUNK
    parts = [recent[f"park_{name}_us"] for name in ("closing", "idle", "out")]
    assert min(parts) > 0
    assert sum(parts) <= recent["total_us"]
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
    eventually(parked_often_enough)
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


def test_the_time_away_goes_on_while_a_job_is_away(pool):
    pool.job(512)
    pool.await_parkable()
    assert pool.clients()[0]["parking"]["away_us"] == 0
    pool.parker(9 * CHUNK, hold_ms=3_600_000, count=1)
    first = eventually(lambda: next((one for one in pool.clients() if one["state"] == "parked"), None))["parking"]["away_us"]
    assert eventually(lambda: pool.clients()[0]["parking"]["away_us"] > first)


def test_a_thread_that_is_held_for_long_says_so_once(pool):
    job = pool.job(512)
    pool.await_parkable()
    parker = pool.parker(9 * CHUNK, hold_ms=3_600_000, count=1)
    said = eventually(lambda: re.findall(r"a thread of this job has been held for [\d.]+ s in (\w+): the job is parked, and comes back"
                                         r" when the pool has 448 MiB for it; .* models hold 576 MiB", job.complaints))
    assert said[0] in ("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "cuPointerGetAttribute", "cuMemFree_v2", "an")
    parker.end()
    assert job.result()["wrong pages"] == 0
    assert job.complaints.count("has been held for") == 1


def test_a_job_that_is_stopped_gives_nothing_and_is_named(pool):
    job = pool.job(512)
    pool.await_parkable()
    pid = pool.clients()[0]["pid"]
    stop(pid)
    assert pool.clients()[0]["stopped"]
    parker = pool.parker(9 * CHUNK, count=1, patience_s=2)
    eventually(lambda: parker.process.poll() is not None)
    parker.end()
    assert f"training (pid {pid}) is stopped" in parker.complaints
    assert f"`kill -CONT {pid}` lets it go on" in parker.complaints
    assert pool.clients()[0]["bytes"] == 8 * CHUNK, "what it has not given is its own"
    os.kill(pid, signal.SIGCONT)
    again = pool.parker(9 * CHUNK, count=1)
    eventually(lambda: again.taken() == 1)
    assert job.result()["wrong pages"] == 0


def test_a_job_that_is_stopped_while_it_is_parked_comes_back_when_it_goes_on(pool):
    job = pool.job(512)
    pool.await_parkable()
    parker = pool.parker(9 * CHUNK, hold_ms=3_600_000, count=1)
    pid = eventually(lambda: next((one for one in pool.clients() if one["state"] == "parked"), None))["pid"]
    eventually(lambda: parker.taken() == 1)
    stop(pid)
    parker.end()
    eventually(lambda: pool.status()["pool"]["serving_bytes"] == 0)
    stopped = pool.clients()[0]
    assert stopped["stopped"]
    assert stopped["state"] == "parked"
    other = pool.parker(9 * CHUNK, count=1)  # nothing of it is needed
    eventually(lambda: len(other.acquisitions()) == 1)
    assert other.acquisitions()[0]["reclaimed"] == 0
    other.end()
    os.kill(pid, signal.SIGCONT)
    assert job.result()["wrong pages"] == 0


def test_status_says_why_a_job_is_not_parked(pool):
    pool.job(512, "--park", "never")
    assert pool.clients()[0]["parking"]["unparkable"] == [{"reason": "never", "bytes": 8 * CHUNK}]
    text = pool.call("status").stdout
    assert re.search(r"cannot be parked\n.*\n  \d+ +512 MiB +never\n", text), text


def test_status_says_what_the_host_copies_cannot_take(pool):
    pool.job(512, host_memory="128MiB")
    pool.await_parkable()
    assert pool.clients()[0]["parking"]["unparkable"] == [{"reason": "host copies are full", "bytes": 6 * CHUNK}]


def test_an_operator_parks_a_job_until_it_is_woken(pool):
    job = pool.job(512)
    pool.await_parkable()
    pid = pool.clients()[0]["pid"]
    done = pool.call("park", "training")
    assert done.returncode == 0, done.stderr
    assert f"training (pid {pid}) is parked until `sluice wake`: 512 MiB are in host copies" in done.stdout
    parked = pool.clients()[0]
    assert parked["state"] == "parked"
    assert parked["bytes"] == 0
    assert parked["parking"]["operator"] == {"done": True, "left_s": None}
    assert "until it is woken" in pool.call("status").stdout
    assert pool.status()["pool"]["free_bytes"] + pool.status()["pool"]["dirty_bytes"] == 640 * MIB
    again = pool.call("park", pid)
    assert again.returncode != 0
    assert f"is parked already, until it is woken; `sluice wake {pid}` lets it come back" in again.stderr
    # Its threads are held and want it back, and there is room; but the operator comes first.
    assert eventually(lambda: f"an operator has parked the job, and `sluice wake {pid}` lets it come back" in job.complaints)
    assert pool.clients()[0]["bytes"] == 0
    # The others have what it leaves, jobs as well.
    other = pool.job(576, seed=5)
    assert other.result()["wrong pages"] == 0
    woken = pool.call("wake", pid)
    assert woken.returncode == 0, woken.stderr
    assert "comes back when the pool has 512 MiB for it" in woken.stdout
    eventually(lambda: pool.clients()[0]["state"] == "running" and pool.clients()[0]["bytes"] == 8 * CHUNK)
    assert pool.clients()[0]["parking"]["operator"] is None
    assert pool.call("wake", pid).returncode != 0
    assert job.result()["wrong pages"] == 0


def test_an_operators_order_ends_by_itself_and_outlives_the_broker(pool):
    job = pool.job(512)
    pool.await_parkable()
    assert pool.call("park", "training", "--for", "30s").returncode == 0
    left = pool.clients()[0]["parking"]["operator"]["left_s"]
    assert 0 < left <= 30
    os.kill(pool.status()["pool"]["broker_pid"], signal.SIGKILL)
    assert eventually(lambda: (found := pool.clients()) and found[0]["parking"]["operator"])["done"]
    eventually(lambda: (found := pool.clients()) and found[0]["state"] == "running")
    assert job.result()["wrong pages"] == 0


def test_a_job_that_an_operator_has_parked_leaves_nothing_behind_when_it_is_killed(pool):
    job = pool.job(512)
    keeper = pool.job(64, seed=9)
    pool.await_parkable(2)
    pid = next(one["pid"] for one in pool.clients() if one["bytes"] == 8 * CHUNK)
    assert pool.call("park", pid).returncode == 0
    assert pool.free_copies() == 640 * MIB - 8 * CHUNK
    os.kill(pid, signal.SIGKILL)
    job.end()
    eventually(lambda: pool.free_copies() == 640 * MIB and len(pool.clients()) == 1)
    assert keeper.result()["wrong pages"] == 0


def test_what_an_operator_cannot_have_is_refused_with_the_reason(pool):
    never = pool.job(128, "--park", "never", "--name", "never", host_memory="128MiB")
    done = pool.call("park", "never")
    assert done.returncode != 0
    assert "never (pid " in done.stderr
    assert "cannot be parked: it was started so (`sluice run --park never`, SLUICE_PARK)" in done.stderr
    done = pool.call("park", "somebody")
    assert done.returncode != 0
    assert re.search(r"no job or engine has the pid or the name somebody; there are never \(pid \d+\)", done.stderr)
    parker = pool.parker(CHUNK, hold_ms=3_600_000, count=1)
    eventually(lambda: parker.acquisitions())
    done = pool.call("park", pool.clients("server")[0]["pid"])
    assert "is of the kind server; only training jobs and engines are parked" in done.stderr
    parker.end()
    # Two jobs with room for one in the host copies.
    first, second = pool.job(128, "--name", "first"), pool.job(128, "--name", "second")
    for name in ("first", "second"):
        eventually(lambda name=name: next(one for one in pool.clients() if one["name"] == name)["parking"]["parkable_bytes"] > 0)
    assert pool.call("park", "first").returncode == 0
    eventually(lambda: next(one for one in pool.clients() if one["name"] == "second")["parking"]["parkable_bytes"] == 0)
    done = pool.call("park", "second")
    assert done.returncode != 0
    assert "keeps 128 MiB, and of the 128 MiB of host copies 0 B are free; nothing was taken" in done.stderr
    assert pool.call("park", "first", "--for", "10").returncode != 0
    for job in (never, first, second):
        if job is first:
            assert pool.call("wake", "first").returncode == 0
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
    second.process.wait(PATIENCE_SECONDS)
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
