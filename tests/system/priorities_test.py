"""Two jobs of different priority in one pool, and a server whose cold model takes memory of which only one of them has enough: whose it is,
and that neither learns anything else for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from host_parking_test import may_hold_pages
from parking_test import Process
from patience import PATIENCE_SECONDS, eventually
from server_models import AFFINE, Affine
from serving import World, floats

JOB = Path(__file__).with_name("priorities_job.py")
POOL = 256  # MiB


class Jobs:
    """Jobs in one pool on the host, and a server with a model."""

    def __init__(self, sluice, folder: Path, monkeypatch) -> None:
        self.sluice, self.folder = sluice, folder
        self.runtime = folder / "runtime"
        monkeypatch.setenv("SLUICE_RUNTIME_DIR", str(self.runtime))
        monkeypatch.setenv("SLUICE_BROKER", str(sluice))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        self.world = World(sluice, folder)
        self.processes: dict[str, Process] = {}

    def serve(self, model_mib: int, host_memory: int = 0) -> None:
        self.affine = self.world.models.add("affine", Affine(padding_mib=model_mib), **AFFINE)
        policy = self.world.policy("affine", memory=f"{POOL}MiB", training="stay: 1")
        if host_memory:
            policy.write_text(policy.read_text(encoding="utf-8") + f"host_copies: {{memory: {host_memory}MiB}}\n", encoding="utf-8")
        self.server = self.world.serve(policy)

    def start(self, name: str, arena: int, keeps: int, *options: str) -> Process:
        made = Process([self.sluice, "run", "--backend", "host", "--memory", f"{POOL}MiB", "--require-pool", "--name", name, *options, "--",
                        sys.executable, JOB, "--arena-mib", arena, "--keep-mib", keeps, "--out", self.folder / f"{name}.json"], {**os.environ})
        self.processes[name] = made
        return made

    def await_all(self) -> None:
        """Until each has made its first step."""
        def ready() -> bool:
            for each in self.processes.values():
                assert each.process.poll() is None, each.complaints
            return all("ready\n" in each.lines.found for each in self.processes.values())
        eventually(ready, "the first steps")

    def take(self) -> None:
        """The model is loaded, and stays."""
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
        (y,) = self.server.outputs("affine", [floats("x", x)])
        torch.testing.assert_close(y, self.affine(x).detach())
        assert self.world.status()["handovers"]["count"] > 0

    def goes_on(self, name: str) -> None:
        before = self.of(name)["commits"]
        eventually(lambda: self.of(name)["commits"] >= before + 3, f"{name} goes on")

    def waits(self, name: str) -> None:
        eventually(lambda: (self.of(name) or {}).get("state") == "waiting", f"{name} waits")

    def of(self, name: str) -> dict:
        return self.world.job(name)

    def check_losses(self) -> None:
        """All have learned what one learns alone."""
        found = []
        for name, job in self.processes.items():
            job.process.stdin.close()
            job.process.wait(PATIENCE_SECONDS)
            job.end()
            assert job.process.returncode == 0, job.complaints
            found.append(json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8")))
            assert found[-1]["kept"]
            assert found[-1]["shared"]
        steps = max(len(one["losses"]) for one in found)
        subprocess.run([sys.executable, JOB, "--arena-mib", "1", "--keep-mib", "1", "--steps", str(steps), "--out", self.folder / "alone.json"],
                       check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(JOB.parents[2] / "runtime" / "python")})
        alone = json.loads((self.folder / "alone.json").read_text(encoding="utf-8"))
        assert not alone["shared"]
        for one in found:
            assert one["losses"] == alone["losses"][:len(one["losses"])]

    def end(self) -> None:
        self.world.end()
        for each in self.processes.values():
            each.end()


@pytest.fixture
def jobs(sluice, tmp_path, monkeypatch):
    made = Jobs(sluice, tmp_path, monkeypatch)
    yield made
    made.end()


@pytest.mark.deadline(600)
def test_a_cold_model_takes_the_memory_of_the_job_of_lower_priority_which_has_less(jobs):
    jobs.serve(160)
    jobs.start("high", 60, 8, "--priority", "high")
    jobs.start("low", 50, 8, "--priority", "low")
    jobs.await_all()
    assert jobs.of("high")["priority"] == "high"
    jobs.take()
    jobs.goes_on("high")
    jobs.waits("low")
    jobs.goes_on("high")
    assert jobs.of("high")["discards"] == 0
    jobs.server.end()
    jobs.goes_on("low")
    jobs.check_losses()


@pytest.mark.deadline(600)
@pytest.mark.skipif(not may_hold_pages(), reason="this user may not hold who touches pages (userfaultfd)")
def test_a_job_of_low_priority_is_parked_before_another_ones_micro_batch_goes(jobs):
    jobs.serve(140, host_memory=POOL)
    jobs.start("low", 20, 120, "--priority", "low")
    jobs.start("usual", 60, 8)
    jobs.await_all()
    eventually(lambda: jobs.of("low")["parking"]["parkable_bytes"] >= 120 << 20)
    jobs.take()
    assert jobs.of("low")["parking"]["parks"] > 0
    jobs.goes_on("usual")
    assert jobs.of("usual")["parking"]["parks"] == 0
    assert jobs.of("usual")["discards"] == 0
    jobs.server.end()
    jobs.goes_on("low")
    jobs.check_losses()


@pytest.mark.deadline(600)
def test_a_minimum_is_left_to_a_job_and_one_of_higher_priority_gives(jobs):
    jobs.serve(140)
    jobs.start("low", 60, 8, "--priority", "low", "--min-memory", "40%")
    jobs.start("high", 60, 8, "--priority", "high")
    jobs.await_all()
    assert jobs.of("low")["min_bytes"] == 104 << 20
    jobs.take()
    jobs.goes_on("low")
    jobs.waits("high")
    jobs.goes_on("low")
    assert jobs.of("low")["discards"] == 0
    shown = subprocess.run([jobs.sluice, "status"], capture_output=True, text=True, check=True).stdout
    assert "priorities\n" in shown
    assert "104 MiB" in shown
    jobs.server.end()
    jobs.goes_on("high")
    jobs.check_losses()


@pytest.mark.deadline(600)
def test_a_job_of_high_priority_has_what_it_needs_of_one_that_had_the_pool_before_it(jobs):
    jobs.serve(8)
    jobs.start("low", 200, 8, "--priority", "low")
    jobs.await_all()
    jobs.start("high", 150, 8, "--priority", "high")
    jobs.await_all()
    jobs.goes_on("high")
    jobs.waits("low")
    jobs.goes_on("high")
    assert jobs.of("high")["discards"] == 0
    high = jobs.processes["high"]
    high.process.stdin.close()
    assert high.process.wait(PATIENCE_SECONDS) == 0
    jobs.goes_on("low")
    jobs.check_losses()


@pytest.mark.deadline(600)
def test_jobs_of_which_only_one_has_room_go_on_by_priority_without_a_server(jobs):
    jobs.start("high", 150, 8, "--priority", "high")
    jobs.await_all()
    jobs.start("low", 150, 8, "--priority", "low")
    jobs.waits("low")
    jobs.goes_on("high")
    high = jobs.processes["high"]
    high.process.stdin.close()
    assert high.process.wait(PATIENCE_SECONDS) == 0
    eventually(lambda: "ready\n" in jobs.processes["low"].lines.found, "the first step of low")
    jobs.check_losses()


def test_a_minimum_that_the_pool_cannot_promise_ends_the_job_and_names_who_has_it(jobs):
    jobs.serve(8)
    first = jobs.start("first", 10, 1, "--min-memory", "200MiB")
    jobs.await_all()
    second = subprocess.run([jobs.sluice, "run", "--backend", "host", "--name", "second", "--min-memory", "30%", "--",
                             sys.executable, JOB, "--arena-mib", "10", "--keep-mib", "1", "--steps", "1", "--out", jobs.folder / "second.json"],
                            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert second.returncode == 125, second.stderr
    assert "78 MiB cannot be promised" in second.stderr
    assert "200 MiB to first (pid" in second.stderr
    assert "56 MiB are left" in second.stderr
    assert not (jobs.folder / "second.json").exists()
    assert first.process.poll() is None


@pytest.mark.parametrize(("options", "variables", "says"), [
    (["--priority", "urgent"], {}, "low,normal,high"),
    (["--min-memory", "4G"], {}, "GiB"),
    (["--min-memory", "120%"], {}, "at most 100%"),
    ([], {"SLUICE_PRIORITY": "urgent"}, "low, normal or high"),
    ([], {"SLUICE_MIN_MEMORY": "4GiB"}, "a number of bytes, or a percentage"),
])
def test_a_wrong_priority_or_minimum_is_refused_before_anything_is_started(sluice, runtime_folder, options, variables, says):
    done = subprocess.run([sluice, "run", "--backend", "host", "--memory", "64MiB", "--runtime-dir", runtime_folder, *options, "--", "true"],
                          env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode in (2, 125), done.stderr
    assert says in done.stderr
