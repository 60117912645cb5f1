"""Jobs, servers and brokers are killed at random instants of parking, over the fake driver: the others go on, each page holds what
it should, and in the end all of the pool and of the host copies is accounted for."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import time

import pytest
from parking_test import CHUNK, MIB, Pool, Process, pool  # noqa: F401
from patience import eventually

ENOUGH = 1000  # so many meet each phase
KILLS = [pytest.param(15, id="short"),
         pytest.param(int(os.environ.get("SLUICE_TEST_PARKING_KILLS", ENOUGH)), id="long", marks=[pytest.mark.long, pytest.mark.deadline(7200)])]
SEED = int(os.environ.get("SLUICE_TEST_SEED", "7"))
#: Each call of these takes so much longer, so that no phase is too short to be met. A job's own copies are inside its gate.
DELAYS = ";".join(f"{call}:{ms * 1_000_000}" for call, ms in (("cuMemcpyDtoH_v2", 4), ("cuMemcpyDtoHAsync_v2", 4), ("cuMemcpyHtoDAsync_v2", 4)))
#: What a job may be doing when it is killed, and what a server and the jobs may when the server or the broker is.
PHASES = {"job": ("running", "closing", "going", "parked", "coming back"),
          "server": ("rests", "demands", "holds"),
          "broker": ("running", "closing", "going", "parked", "coming back")}
SURVIVORS = 1
OTHERS = 2


def state_of_job(status: dict, pid: int) -> str:
    found = next((one["state"] for one in status.get("clients", []) if one["pid"] == pid), "gone")
    return "running" if found == "waiting" else found


def phase_of_server(status: dict) -> str:
    clients = status.get("clients", [])
    if any(one["kind"] == "server" and one["bytes"] > 0 for one in clients):
        return "holds"
    return "demands" if any(one["state"] in ("closing", "going") for one in clients) else "rests"


def phase_of_jobs(status: dict) -> str:
    """The furthest from rest."""
    states = [one["state"] for one in status.get("clients", []) if one["kind"] == "training"]
    return next((state for state in ("coming back", "going", "closing", "parked") if state in states), "running")


class Killer:
    def __init__(self, pool: Pool, seed: int):
        self.pool, self.chance = pool, random.Random(seed)
        self.struck: collections.Counter[tuple[str, str]] = collections.Counter()
        self.survivors = [pool.job(192, seed=3 + number, FAKE_CUDA_DELAY=DELAYS) for number in range(SURVIVORS)]
        self.kept = {one["pid"] for one in pool.clients()}
        self.jobs: dict[int, Process] = {}
        self.next_seed = 100
        self.parker = None
        self.fill()

    def fill(self) -> None:
        """There are as many jobs as before, and a server."""
        while len(self.jobs) < OTHERS:
            self.next_seed += 1
            job = self.pool.job(128, seed=self.next_seed, FAKE_CUDA_DELAY=DELAYS)
            pid = eventually(lambda: next((one["pid"] for one in self.pool.clients()
                                           if one["pid"] not in self.kept | set(self.jobs) and one["state"] != "gone"), None))
            self.jobs[pid] = job
        if self.parker is None or self.parker.process.poll() is not None:
            self.next_seed += 1
            self.parker = self.pool.parker(5 * CHUNK, 10 * CHUNK, hold_ms=60, apart_ms=60, seed=self.next_seed)

    def await_phase(self, victim: str, phase: str, pid: int) -> None:
        """Usually; a phase that does not come is no reason to wait for ever."""
        until = time.monotonic() + 1
        while time.monotonic() < until:
            status = self.pool.status()
            seen = {"job": lambda: state_of_job(status, pid), "server": lambda: phase_of_server(status),
                    "broker": lambda: phase_of_jobs(status)}[victim]()
            if seen == phase:
                return

    def kill(self) -> None:
        victim = self.chance.choice(["job", "job", "server", "broker"])
        pid = self.chance.choice(list(self.jobs)) if victim == "job" else 0
        if self.chance.random() < 0.5:
            self.await_phase(victim, min(PHASES[victim], key=lambda phase: self.struck[victim, phase]), pid)
        else:
            time.sleep(self.chance.uniform(0, 0.15))  # the instant
        getattr(self, "kill_" + victim)(pid)
        self.fill()

    def kill_job(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)  # so that it dies in the phase that is seen
        self.struck["job", state_of_job(self.pool.status(), pid)] += 1
        os.kill(pid, signal.SIGKILL)
        gone = self.jobs.pop(pid)
        gone.end()
        assert "wrong" not in gone.complaints, gone.complaints

    def kill_server(self, _pid: int) -> None:
        self.parker.process.send_signal(signal.SIGSTOP)
        self.struck["server", phase_of_server(self.pool.status())] += 1
        self.parker.end()

    def kill_broker(self, _pid: int) -> None:
        status = self.pool.status()
        if broker := status.get("pool", {}).get("broker_pid"):
            self.struck["broker", phase_of_jobs(status)] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(broker, signal.SIGKILL)
            eventually(lambda: self.pool.status().get("pool", {}).get("broker_pid", broker) != broker)

    def places(self) -> list[dict]:
        """Where host copies are: memory, and a disk if there is one."""
        copies = self.pool.status()["pool"]["host_copies"]
        return [one for one in (copies, copies["disk"]) if one]

    def all_is_accounted_for(self) -> None:
        """With nobody who demands."""
        self.parker.end()
        jobs = SURVIVORS + OTHERS
        eventually(lambda: len(found := self.pool.clients()) == jobs and all(one["state"] == "running" for one in found)
                   and not self.pool.clients("server"))
        chunks = SURVIVORS * 3 + OTHERS * 2
        status = self.pool.status()
        assert sum(one["bytes"] for one in status["clients"]) + status["pool"]["free_bytes"] + status["pool"]["dirty_bytes"] == 640 * MIB
        assert all(one["kept_bytes"] <= one["bytes"] for one in status["clients"])
        places = eventually(lambda: (found := self.places()) and sum(one["held_bytes"] for one in found) == 0 and found)
        assert sum(one["damaged_bytes"] for one in places) == 0
        assert sum(one["free_bytes"] for one in places) >= 640 * MIB - chunks * CHUNK, "what those that live keep themselves"
        for job in [*self.survivors, *self.jobs.values()]:
            assert job.process.poll() is None, job.complaints
            assert "wrong" not in job.complaints, job.complaints


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("host_memory", [640, 128])
def test_whoever_is_killed_the_others_go_on_and_nothing_is_lost(pool, disk_folder, kills, host_memory):  # noqa: F811
    """With all host copies in memory, and with most of them on a disk."""
    pool.host_memory = f"{host_memory}MiB"
    if host_memory < 640:
        pool.disk = ("--host-disk", f"{640 - host_memory}MiB", "--host-disk-path", str(disk_folder))
    killer = Killer(pool, SEED)
    try:
        while (done := sum(killer.struck.values())) < kills:
            killer.kill()
            if done % 50 == 49:
                killer.all_is_accounted_for()
                killer.fill()
                print(f"{done + 1} kills", dict(killer.struck), flush=True)
        killer.all_is_accounted_for()
    finally:
        print(f"seed {SEED}:", *(f"{who} {phase}: {count}" for (who, phase), count in sorted(killer.struck.items())), sep="\n  ", flush=True)
    for job in [*killer.survivors, *killer.jobs.values()]:
        result = job.result()
        assert result["wrong pages"] == 0
        assert result["rounds"] > 0
    if kills >= ENOUGH:
        assert {(victim, phase) for victim, phases in PHASES.items() for phase in phases} <= set(killer.struck)
