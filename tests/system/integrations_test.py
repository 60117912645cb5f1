"""The examples of accelerate, Hugging Face's Trainer and Lightning, under `sluice run` while a server takes their memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deadline(900)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from brokers import end_broker  # noqa: E402
from exactness import environment  # noqa: E402

SCRIPTS = [("train_accelerate.py", "accelerate"), ("train_transformers.py", "accelerate"),
           ("train_lightning.py", "lightning")]
#: So many that some meet a micro-batch: waiting for a number that do may take minutes, once slices have become smaller.
DEMAND_BYTES, DEMANDS, MOST_DELAY_MS = 8 << 20, 50, 150


def lines_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("script, needed", SCRIPTS)
def test_handovers_leave_the_losses_as_they_are(sluice, runtime_folder, tmp_path, script, needed):
    pytest.importorskip(needed, reason=f"{needed} is not installed: see tests/requirements.txt")
    command = [sys.executable, EXAMPLES / script, "--device", "cpu", "--deterministic", "--log-interval", "0"]
    enough = tmp_path / "enough"
    with subprocess.Popen(
            [sluice, "run", "--backend", "host", "--memory", "192MiB", "--require-pool", "--", *command,
             "--until", enough, "--log", tmp_path / "shared"], env=environment()) as training:
        try:
            server = subprocess.run(
                [sluice.parent / "sluice-bench-handover", "--runtime-dir", runtime_folder, "--bytes", str(DEMAND_BYTES),
                 "--count", str(DEMANDS), "--delay-ms", str(MOST_DELAY_MS), "--range"],
                env={**environment(), "SLUICE_BROKER": str(sluice)}, capture_output=True, text=True, check=False)
            enough.touch()
            assert training.wait() == 0 and server.returncode == 0, server.stderr
        finally:
            training.kill()
            training.wait()
            end_broker(runtime_folder)
    shared = lines_of(tmp_path / "shared")
    assert shared[-1]["discards"] > 0
    print(f"{shared[-1]['discards']} discards, {shared[-1]['step']} steps")
    done = subprocess.run([*command, "--steps", str(shared[-1]["step"]), "--log", tmp_path / "plain"], env=environment(),
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plain = lines_of(tmp_path / "plain")
    if all(line["commits"] == 2 * line["step"] for line in shared):  # no slice had to become smaller
        assert [line["loss"] for line in shared] == [line["loss"] for line in plain]
    assert [line["loss"] for line in shared] == pytest.approx([line["loss"] for line in plain], rel=1e-3)


@pytest.mark.parametrize("script, needed", SCRIPTS)
def test_two_processes_train_in_one_pool(sluice, runtime_folder, tmp_path, script, needed):
    pytest.importorskip(needed, reason=f"{needed} is not installed: see tests/requirements.txt")
    done = subprocess.run(
        [sluice, "run", "--backend", "host", "--memory", "192MiB", "--require-pool", "--", sys.executable, "-m",
         "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", "--", sys.executable, EXAMPLES / script,
         "--device", "cpu", "--steps", "4", "--log-interval", "0", "--log", tmp_path / "log"],
        env=environment(), capture_output=True, text=True, check=False)
    end_broker(runtime_folder)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = lines_of(tmp_path / "log")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert lines[-1]["loss"] < lines[0]["loss"]
