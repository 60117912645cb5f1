"""What a process that waits for memory tells of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.importorskip("torch")

from scripted_runtime import ScriptedRuntime  # noqa: E402

from sluice import _planning  # noqa: E402

NEEDED = 1 << 20


class Short(ScriptedRuntime):
    """Its pool has too little for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = 0.0

    def plan(self, remaining: int) -> tuple[int, int, bool]:
        return remaining if self.now >= self.seconds else 0, NEEDED, False

    def wait_memory(self, needed: int, timeout_ms: int) -> int:
        assert needed == NEEDED
        self.now += timeout_ms / 1e3
        return int(self.now >= self.seconds)

    def reachable_bytes(self) -> int:
        return 2 * NEEDED


@pytest.mark.parametrize("together, seconds, notices", [(True, 25, 0), (True, 160, 3), (False, 25, 0), (False, 160, 3), (False, 1000, 6)])
def test_whoever_waits_for_long_says_so_and_more_seldom_if_nobody_waits_for_it(monkeypatch, capfd, together, seconds, notices):
    runtime = Short(seconds)
    monkeypatch.setattr(_planning.time, "perf_counter", lambda: runtime.now)
    planner = _planning.Planner(runtime, adapt=False, together=together)
    assert planner.next(4, 4) == 4
    assert planner.wait_seconds == pytest.approx(seconds, abs=0.2)
    said = capfd.readouterr().err
    assert said.count("sluice: a micro-batch of 4 samples waits for 1048576 bytes") == notices
    assert said.count("and other processes for it") == (notices if together else 0)
