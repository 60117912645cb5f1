"""vLLM with its KV cache out of the pool gives the stock engine's answers, whatever is granted, refused or taken meanwhile."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from parking_test import Parker, Process
from patience import PATIENCE_SECONDS, eventually

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("vllm_engine.py")
HOLDER = Path(__file__).with_name("holding_job.py")
JOB = ROOT / "benchmarks" / "exact_job.py"
VLLM = ROOT / ".cache" / "vllm"
MIB = 1 << 20
CHUNK = 2 * MIB
POOL = 128  # MiB
BLOCKS = 512  # of 64 KiB: 32 in a chunk, so 16 chunks
TAKEN = int(os.environ.get("SLUICE_TEST_PARKS", "8"))
SECONDS = 600.0  # of a start beside other tests

pytestmark = [pytest.mark.deadline(1800),
              pytest.mark.skipif(not (VLLM / "vllm").is_dir(), reason="vLLM is not installed: ./scripts/setup.sh --tests, with torch 2.11")]


class Engine(Process):
    """`vllm_engine.py`; it is asked one thing at a time."""

    def __init__(self, folder: Path, environment: dict):
        super().__init__([sys.executable, ENGINE, folder, BLOCKS], environment)
        self._heard = 0
        self.begun = self._answer()

    def ask(self, line: str) -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        eventually(lambda: self._json(self._heard) is not None or self.process.poll() is not None, SECONDS)
        assert (found := self._json(self._heard)) is not None, self.complaints
        self._heard += 1
        return found

    def _json(self, number: int) -> dict | None:
        lines = [line for line in list(self.lines.found) if line.startswith("{") and line.endswith("\n")]
        return json.loads(lines[number]) if number < len(lines) else None


class Pool:
    def __init__(self, sluice, build, folder: Path):
        self.sluice, self.build, self.folder = sluice, build, folder
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700)
        plugin = folder / "plugin" / "sluice-0.dist-info"  # as an installed package would have it
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice\nVersion: 0\n", encoding="utf-8")
        (plugin / "entry_points.txt").write_text(entry_points(), encoding="utf-8")
        paths = [plugin.parent, ROOT / "runtime" / "python", VLLM]
        self.environment = {**os.environ, "SLUICE_RUNTIME_DIR": str(runtime), "SLUICE_BROKER": str(sluice), "SLUICE_BACKEND": "host",
                            "SLUICE_POOL_BYTES": str(POOL * MIB), "OMP_NUM_THREADS": "1"}
        self.vllm = {**self.environment, "PYTHONPATH": os.pathsep.join(map(str, paths)), "VLLM_CACHE_ROOT": str(folder / "cache"),
                     "SLUICE_RUNTIME_LIBRARY": str(build / "lib" / "libsluice_runtime.so"), "SLUICE_VLLM_LINGER_MS": "200",
                     "SLUICE_VLLM_CACHED_CHUNKS": "2"}
        self.processes: list[Process] = []

    def started(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def engine(self) -> Engine:
        model = self.folder / "model"
        model.mkdir()
        return self.started(Engine(model, self.vllm))

    def run(self, *command) -> Process:
        return self.started(Process([self.sluice, "run", "--backend", "host", "--require-pool", "--", sys.executable, *command],
                                    {**self.environment, "PYTHONPATH": str(ROOT / "runtime" / "python")}))

    def parker(self, least: int, most: int) -> Parker:
        return self.started(Parker([self.build / "bin" / "sluice-bench-parker", "--from-engines", "--least", least, "--most", most, "--count", 1_000_000,
                                    "--hold-ms", 20, "--apart-ms", 60], self.environment))

    def status(self) -> dict:
        shown = Process([self.sluice, "status", "--json"], self.environment)
        shown.process.wait(PATIENCE_SECONDS)
        shown.end()
        return json.loads("".join(shown.lines.found))

    def chunks(self, who: str) -> int:
        return self.status()["pool"][f"{who}_bytes"] // CHUNK

    def free_chunks(self) -> int:
        return self.chunks("free") + self.chunks("dirty")

    def end(self) -> None:
        for each in reversed(self.processes):
            each.end()


def entry_points() -> str:
    """The package's own, as `pyproject.toml` has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group, = re.findall(r'^\[project\.entry-points\."(vllm\.[a-z_]+)"\]\n((?:\w+ = "[^"]+"\n)+)', text, re.MULTILINE)
    return f"[{group[0]}]\n" + group[1].replace('"', "")


@pytest.fixture
def pool(sluice, build, tmp_path):
    made = Pool(sluice, build, tmp_path)
    yield made
    made.end()


def test_what_vllm_describes_is_refused_by_the_name_that_the_documentation_has(tmp_path):
    paths = [ROOT / "runtime" / "python", VLLM]
    said = json.loads(subprocess.run([sys.executable, Path(__file__).with_name("vllm_refusals.py"), tmp_path], check=True, capture_output=True, text=True,
                                     env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}).stdout.splitlines()[-1])
    assert [said.pop(taken) for taken in ("", "no events", "on a GPU", "cache: windows beside whole attention")] == ["", "", "", ""]
    assert "a MambaSpec, whose blocks" in said.pop("cache: states")
    assert "a UniformTypeKVCacheSpecs, whose blocks" in said.pop("cache: pages of two sizes")
    assert said.pop("pipeline parallel") == said["tensor or pipeline parallel"]
    page = (ROOT / "docs" / "llm.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.partition("| refused | why | instead |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()]
    assert sorted(said) == sorted(what for what, _, _ in rows)
    for what, why, instead in rows:
        assert said[what].startswith(f"vLLM's KV cache cannot come out of the pool: {what}"), said[what]
        assert f": {why}. What would be right: {instead}. With SLUICE_VLLM_KV=own" in said[what]


def test_blocks_behind_a_window_and_probabilities_of_prompts_are_there_as_long_as_they_are_wanted():
    paths = [ROOT / "runtime" / "python", VLLM]
    said = subprocess.run([sys.executable, Path(__file__).with_name("vllm_parts.py")], check=True, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}).stdout.splitlines()[-1]
    made = json.loads(said)
    assert made["windows"] == [(1000 - 64 + 1) // 16, (1000 - 512 - 64 + 1) // 16], "kernels read what lies before it"
    assert made["prompts"] == [None, None, "probabilities", None, None, None, 0], "vLLM takes them with a token alone"


def assert_equal(answer: dict) -> dict:
    assert answer["equal"] == answer["of"] > 0, answer
    return answer


def test_answers_are_the_stock_engines_while_memory_comes_and_goes(pool, tmp_path):
    engine = pool.engine()
    assert engine.begun["words"] > 200, "answers that all say the same would not tell"
    assert engine.begun["stock"] == "vllm.v1.core.block_pool"

    # What finds blocks where there may be none is refused, and leaves nobody's memory behind.
    for engine_with, why in (("events", "events of the KV cache"), ("size", "--num-gpu-blocks-override 2048 at most")):
        said = engine.begun["refused"][engine_with]
        assert said.startswith("sluice.vllm._checks.Refused: vLLM's KV cache cannot come out of the pool: "), said
        assert why in said
    eventually(lambda: pool.chunks("engine") == 1)

    # It grows as far as its requests need, and gives back what it does not keep.
    grown = assert_equal(engine.ask("batch"))
    assert 5 < grown["most"] <= BLOCKS // 32
    assert (grown["refused"], grown["preempted"]) == (0, 0)
    again = assert_equal(engine.ask("batch"))
    assert again["known"] > 0, "what every third prompt begins with"
    eventually(lambda: engine.ask("counts")["owned"] <= 4)  # the first, a spare one, and two for what is cached
    eventually(lambda: pool.chunks("engine") == engine.ask("counts")["owned"])
    assert engine.ask("reset")["reset"]
    eventually(lambda: pool.chunks("engine") <= 2)

    # A job leaves three chunks: requests wait, and are computed anew.
    before = engine.ask("counts")
    job = pool.run(HOLDER, str(POOL - 12))
    eventually(lambda: "holds\n" in job.lines.found or job.process.poll() is not None)
    assert job.process.poll() is None, job.complaints
    room = pool.free_chunks() + pool.chunks("engine")
    limited = assert_equal(engine.ask("batch"))
    assert limited["refused"] > before["refused"]
    assert pool.chunks("engine") <= room
    job.end()
    eventually(lambda: pool.chunks("training") == 0)

    # A job trains, and gives its memory to somebody who then takes the engine's as well.
    until, out = tmp_path / "until", tmp_path / "learned"
    job = pool.run(JOB, "--device", "cpu", "--until", until, "--out", out)
    eventually(lambda: pool.chunks("training") > 0 or job.process.poll() is not None)
    before = engine.ask("counts")
    parker = pool.parker(POOL * MIB // 4, (POOL - 8) * MIB)
    patience = time.monotonic() + SECONDS
    while (now := assert_equal(engine.ask("batch")))["demanded"] < before["demanded"] + TAKEN or now["preempted"] < before["preempted"] + TAKEN:
        assert time.monotonic() < patience, (before, now)
    parker.end()
    assert parker.taken() > 0
    until.touch()
    job.process.wait(PATIENCE_SECONDS)
    learned = json.loads(out.read_text(encoding="utf-8"))
    assert learned["shared"]
    assert learned["stats"]["commits"] > 0

    # All that it had is there again for the next requests, and the pool's when it ends.
    assert_equal(engine.ask("batch"))
    engine.ask("end")
    eventually(lambda: pool.chunks("engine") == 0)
