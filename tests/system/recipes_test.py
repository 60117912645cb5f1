"""The recipes: each learns under `sluice run` what it learns in plain PyTorch, to the bit, since its slices are the same."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from brokers import end_broker  # noqa: E402
from exactness import environment, reference  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
JOB = Path(__file__).resolve().parent / "recipes_job.py"
PAGE = ROOT / "docs" / "recipes.md"
NEEDED = {"with_accelerate": "accelerate", "with_trainer": "accelerate", "with_lightning": "lightning"}
NAMES = sorted(file.stem for file in RECIPES.glob("*.py"))
STEPS = 4  # from the third on a step runs its optimizer inside of the last commit
pytestmark = [pytest.mark.deadline(900), pytest.mark.xdist_group("recipes")]  # which two processes run, one after the other


class Runner:
    """Runs recipes in a pool, or outside of one."""

    def __init__(self, folder: Path, under: list) -> None:
        self._said = folder / "said"
        self._process = subprocess.Popen(
            [*under, sys.executable, JOB, "torch._dynamo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said.open("w"), text=True,
            env={**environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                 "SLUICE_RUNTIME_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
                 "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"})  # to try them takes half a minute
        self._folder = folder
        self._answers_due = 0
        self.saved = folder

    def start(self, name: str, *arguments: object) -> None:
        """One at a time; what nobody has asked for, because its test had failed, is left."""
        while self._answers_due:
            self._answer()
        self.saved = self._folder / f"{name}.pt"
        self.saved.unlink(missing_ok=True)
        command = [RECIPES / f"{name}.py", "--save", self.saved, *arguments]
        self._process.stdin.write(json.dumps([str(word) for word in command]) + "\n")
        self._process.stdin.flush()
        self._answers_due += 1

    def _answer(self) -> str:
        self._answers_due -= 1
        return self._process.stdout.readline().strip()

    def learnt(self) -> Any:
        """What it has saved, when it has ended."""
        status = self._answer()
        said = self._said.read_text()
        assert status == "0" and "trains without sharing" not in said, said[-4000:]
        return torch.load(self.saved, weights_only=False)

    def run(self, name: str, *arguments: object) -> Any:
        self.start(name, *arguments)
        return self.learnt()

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="sluice-test-") as folder:
        runner = Runner(Path(folder), [])
        yield runner
        runner.end()


@pytest.fixture(scope="module")
def shared(sluice) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="sluice-test-") as folder:
        runner = Runner(Path(folder), [sluice, "run", "--backend", "host", "--memory", "256MiB", "--require-pool", "--"])
        yield runner
        runner.end()
        with contextlib.suppress(OSError):
            end_broker(folder)


def bits(value: Any) -> Any:
    """To be compared: tensors by their bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return value


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_learns_the_same_in_the_pool_as_in_plain_torch(name, plain, shared):
    pytest.importorskip(NEEDED.get(name, "torch"), reason=f"see tests/requirements.txt for {name}")
    shared.start(name, "--steps", STEPS)
    learnt = bits(plain.run(name, "--steps", STEPS))
    again = bits(shared.learnt())
    if learnt != again:  # plain PyTorch is at times not the same in every bit from one process to the next
        learnt = reference(lambda: as_a_run(bits(plain.run(name, "--steps", STEPS))), as_a_run(again))[0]["digest"]
    assert learnt == again


def as_a_run(learnt: Any) -> dict:
    return {"digest": learnt, "losses": [], "steps": STEPS}


def test_another_process_goes_on_from_a_checkpoint_as_if_nothing_had_been(plain, shared, tmp_path):
    for runner in (plain, shared):
        whole = bits(runner.run("checkpoint", "--steps", 2 * STEPS))
        runner.run("checkpoint", "--steps", STEPS)
        half = tmp_path / "half.pt"
        runner.saved.rename(half)
        assert bits(runner.run("checkpoint", "--steps", 2 * STEPS, "--resume", half)) == whole


def test_the_page_links_every_recipe():
    linked = re.findall(r"\(\.\./examples/recipes/(\w+)\.py\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(linked) == NAMES
