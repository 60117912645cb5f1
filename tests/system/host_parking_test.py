"""Scripts that know nothing of Sluice are parked on the host backend, under their threads, workers and checkpoints: what they learn is
what they would have learned alone."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import parking_test
import pytest
import torch
from parking_test import Parker, Process
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import World, floats

JOB = Path(__file__).with_name("host_parking_job.py")
RANKS = Path(__file__).with_name("parking_ranks.py")
MIB = 1 << 20
CAP_SYS_PTRACE = 19  # linux/capability.h
POOL = 640  # MiB
KEEPS = 192  # MiB, beside parameters and their like
LEAST, MOST = 480 * MIB, 560 * MIB
PARKS = int(os.environ.get("SLUICE_TEST_PARKS", "8"))
KILLS = int(os.environ.get("SLUICE_TEST_KILLS", "9"))


def may_hold_pages() -> bool:
    """As userfaultfd(2) has it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
    return (bool(capabilities >> CAP_SYS_PTRACE & 1) or os.access("/dev/userfaultfd", os.W_OK)
            or Path("/proc/sys/vm/unprivileged_userfaultfd").read_text(encoding="ascii").strip() == "1")


pytestmark = pytest.mark.skipif(not may_hold_pages(), reason="this user may not hold who touches pages (userfaultfd)")


class Pool(parking_test.Pool):
    """On the host, with as much of host copies."""

    host_memory = f"{POOL}MiB"

    def __init__(self, sluice, build, folder):
        super().__init__(sluice, build, folder, OMP_NUM_THREADS="1")

    def job(self, steps: int, *options: str, keeps: int = KEEPS, **environment: str) -> Process:
        made = Process([self.sluice, "run", "--backend", "host", "--memory", f"{POOL}MiB", "--host-memory", self.host_memory,
                        *self.disk, "--require-pool", *options, "--", sys.executable, JOB, steps, keeps], {**self.environment, **environment})
        self.processes.append(made)
        eventually(lambda: "ready\n" in made.lines.found or made.process.poll() is not None)
        assert made.process.poll() is None, made.complaints
        return made

    def ranks(self, kind: str, steps: int, folder: Path, *options: str, timeout_s: int = 600) -> Process:
        """Two ranks in one pool, which together keep most of it."""
        folder.mkdir()
        made = Process([self.sluice, "run", "--backend", "host", "--memory", f"{POOL}MiB", "--host-memory", f"{POOL}MiB", "--require-pool",
                        *options, "--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS, kind,
                        steps, 160, folder, timeout_s, "cpu"], self.environment)
        self.processes.append(made)
        return made

    def parker(self, least: int = LEAST, most: int = MOST, *, hold_ms: int = 20, apart_ms: int = 200, seed: int = 1, count: int = 1_000_000,
               options: tuple = ()) -> Parker:
        made = Parker([self.build / "bin" / "sluice-bench-parker", "--least", least, "--most", most, "--count", count, "--hold-ms", hold_ms,
                       "--apart-ms", apart_ms, "--seed", seed, *options], self.environment)
        self.processes.append(made)
        return made

    def await_parkable(self) -> None:
        eventually(lambda: any(one["parking"]["parkable_bytes"] >= KEEPS * MIB for one in self.clients()))


@pytest.fixture
def pool(sluice, build, tmp_path):
    made = Pool(sluice, build, tmp_path / "runtime")
    yield made
    made.end()


def steps_of(job: Process) -> int:
    return sum(line.startswith("step ") for line in list(job.lines.found))


def parks(pool: Pool) -> int:
    """Of all jobs; not every demand needs one, since what nothing lives in is given as it is."""
    return sum(one["parking"]["parks"] for one in pool.clients())


def outcome(job: Process, steps: int = 0) -> tuple:
    """What it has learned, when it has made so many steps."""
    eventually(lambda: steps_of(job) >= steps or job.process.poll() is not None)
    found = job.result()
    assert found["wrong counts"] == 0
    assert found["kept"]
    return found["losses"], found["parameters"]


@pytest.mark.deadline(600)
def test_losses_are_those_of_an_undisturbed_job(pool):
    alone = outcome(pool.job(48), 48)
    job = pool.job(48)
    pool.await_parkable()
    parker = pool.parker()
    eventually(lambda: parks(pool) >= PARKS or job.process.poll() is not None)
    parker.end()
    assert outcome(job, 48) == alone


@pytest.mark.deadline(600)
def test_losses_are_those_of_an_undisturbed_job_whose_memory_lies_on_a_disk(pool, disk_folder):
    pool.host_memory, pool.disk = "16MiB", ("--host-disk", f"{POOL}MiB", "--host-disk-path", str(disk_folder))
    alone = outcome(pool.job(48), 48)
    job = pool.job(48)
    pool.await_parkable()
    parker = pool.parker()
    on_disk = []

    def often_enough() -> bool:
        on_disk.extend(one["parking"]["disk_bytes"] for one in pool.clients())
        return parks(pool) >= PARKS or job.process.poll() is not None
    eventually(often_enough)
    parker.end()
    assert max(on_disk) > 0
    assert outcome(job, 48) == alone
    assert not list(disk_folder.iterdir())


def outcome_of_ranks(ranks: Process, folder: Path) -> list[dict]:
    ranks.process.wait(PATIENCE_SECONDS)
    ranks.end()
    assert ranks.process.returncode == 0, ranks.complaints
    found = [json.loads((folder / f"rank-{number}.json").read_text(encoding="utf-8")) for number in range(2)]
    assert all(one.pop("kept") for one in found)
    return found


@pytest.mark.deadline(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "step-ddp", "step-fsdp"])
def test_ranks_learn_what_they_would_have_learned_undisturbed(pool, tmp_path, kind):
    alone = outcome_of_ranks(pool.ranks(kind, 24, tmp_path / "alone"), tmp_path / "alone")
    ranks = pool.ranks(kind, 24, tmp_path / "parked")
    eventually(lambda: sum(one["parking"]["parkable_bytes"] >= 160 * MIB for one in pool.clients()) == 2)
    parker = pool.parker(hold_ms=5, apart_ms=5, count=max(4, PARKS // 2))
    most = 0

    def have_ended() -> bool:
        nonlocal most
        most = max(most, parks(pool))
        return ranks.process.poll() is not None

    eventually(have_ended)
    parker.end()
    assert outcome_of_ranks(ranks, tmp_path / "parked") == alone
    assert most >= 2


@pytest.mark.deadline(900)
def test_a_rank_is_back_before_the_others_have_waited_for_too_long(pool, tmp_path):
    """The server would keep what it has for an hour, unless it is owed to the job, and its policy promises no share."""
    ranks = pool.ranks("ddp", 40, tmp_path / "ranks", "--collective-timeout", "24s", timeout_s=24)
    eventually(lambda: sum(one["parking"]["parkable_bytes"] >= 160 * MIB for one in pool.clients()) == 2)
    parker = pool.parker(least=MOST, hold_ms=3_600_000, count=1, options=("--gives-back", "--share", "0"))
    eventually(lambda: parker.taken() == 1 or ranks.process.poll() is not None)
    away = [one["parking"] for one in pool.clients() if one["parking"]["parked_bytes"] > 0]
    assert away
    outcome_of_ranks(ranks, tmp_path / "ranks")


@pytest.mark.deadline(900)
def test_who_only_touches_its_memory_has_it_back(pool):
    """Its steps are over: a thread that adds to an array is all that is left of it, and knows no operators."""
    job = pool.job(1)
    eventually(lambda: steps_of(job) == 1)
    pool.await_parkable()
    parker = pool.parker(count=1, hold_ms=0)
    eventually(lambda: parker.taken() == 1)
    eventually(lambda: pool.clients()[0]["parking"]["parked_bytes"] == 0)
    assert pool.clients()[0]["parking"]["parks"] == 1
    outcome(job)


@pytest.mark.parametrize("way", ["--park", "SLUICE_PARK"])
def test_who_is_not_to_be_parked_keeps_what_it_has(pool, way):
    job = pool.job(1, *(["--park", "never"] if way == "--park" else []), **({way: "never"} if way == "SLUICE_PARK" else {}))
    eventually(lambda: steps_of(job) == 1)
    parker = pool.parker()
    eventually(lambda: len(parker.acquisitions()) > 3)
    assert all("keeps" in one["refused"] for one in parker.acquisitions())
    assert pool.clients()[0]["parking"]["parks"] == 0
    outcome(job)


@pytest.mark.deadline(600)
def test_whoever_is_killed_at_whatever_instant_the_job_goes_on_and_nothing_is_lost(pool):
    chance = random.Random(5)
    job = pool.job(10_000)
    parker = pool.parker(apart_ms=20)
    for number in range(KILLS):
        before, steps = parker.taken(), steps_of(job)
        eventually(lambda: parker.taken() > before or parker.process.poll() is not None)  # noqa: B023  called at once
        time.sleep(chance.uniform(0, 0.2))  # the instant
        if chance.random() < 0.6:
            parker.end()
            parker = pool.parker(apart_ms=20, seed=50 + number)
        else:
            broker = pool.status().get("pool", {}).get("broker_pid")
            if broker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(broker, signal.SIGKILL)
        eventually(lambda: steps_of(job) > steps)  # noqa: B023
    parker.end()
    eventually(lambda: len(jobs := pool.clients()) == 1 and jobs[0]["parking"]["parked_bytes"] == 0)
    pool_now = pool.status()
    assert pool_now["clients"][0]["bytes"] + pool_now["pool"]["free_bytes"] + pool_now["pool"]["dirty_bytes"] == POOL * MIB
    outcome(job)


@pytest.mark.deadline(900)
def test_a_job_that_is_killed_while_it_is_parked_leaves_nothing_behind(pool):
    job = pool.job(10_000)
    pool.await_parkable()
    parker = pool.parker(count=1, hold_ms=3_600_000)
    eventually(lambda: pool.clients()[0]["parking"]["parked_bytes"] > 0)
    os.kill(pool.clients()[0]["pid"], signal.SIGKILL)
    job.end()
    eventually(lambda: pool.status()["pool"]["host_copies"]["free_bytes"] == POOL * MIB)
    parker.end()
    eventually(lambda: pool.status()["pool"]["free_bytes"] + pool.status()["pool"]["dirty_bytes"] == POOL * MIB)


@pytest.mark.deadline(900)
def test_a_cold_model_is_served_beside_a_job_that_keeps_nearly_all(sluice, build, tmp_path, monkeypatch):
    """Its weights need three quarters of a pool of which a job keeps half."""
    pool = Pool(sluice, build, tmp_path / "runtime")
    monkeypatch.setenv("SLUICE_RUNTIME_DIR", pool.environment["SLUICE_RUNTIME_DIR"])
    world = World(sluice, tmp_path)
    try:
        affine = world.models.add("affine", Affine(padding_mib=480), **AFFINE)
        alone = outcome(pool.job(24), 24)
        policy = world.policy("affine", memory=f"{POOL}MiB", idle="100ms", training="stay: 1")
        policy.write_text(policy.read_text(encoding="utf-8") + f"host_copies: {{memory: {POOL}MiB}}\n", encoding="utf-8")
        server = world.serve(policy)  # first: the job is not to be done before it is there
        job = pool.job(24)
        pool.await_parkable()
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))

        def answer() -> list | None:
            status, found = server.infer("affine", [floats("x", x)])
            assert status == 200 or (status == 503 and "have come back a moment ago" in found["error"]), found
            return found["outputs"][0]["data"] if status == 200 else None

        while steps_of(job) < 24:
            torch.testing.assert_close(torch.tensor(eventually(answer)).view(2, 2), affine(x).detach())
            before = steps_of(job)
            eventually(lambda: steps_of(job) > before or steps_of(job) == 24)  # noqa: B023  called at once
        assert pool.clients()[0]["parking"]["parks"] > 0
        assert outcome(job, 24) == alone
    finally:
        pool.end()
        world.end()
