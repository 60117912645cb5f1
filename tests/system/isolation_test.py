"""Neither side sees the other's bytes, although training goes on using what was taken from it.

On the host backend, and on the CUDA backend over the fake driver, which refuses what the real one refuses.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import isolation  # noqa: E402

HANDOVERS = 200
pytestmark = pytest.mark.deadline(300)


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_nobody_sees_the_other_sides_bytes(build, monkeypatch, backend):
    if backend == "cuda":
        monkeypatch.setenv("LD_LIBRARY_PATH", str(build / "lib" / "fake_driver"))
    said = isolation.measure(backend, HANDOVERS, 0, build / "bin")
    print(said)
    assert said["handovers"] >= HANDOVERS
    assert said["revocations"] > 0 and said["probes"] > 1000
    assert said["checked_bytes"] > 0 and said["granted_bytes"] > 0
    assert not any(said[name] for name in isolation.NEVER)
    if backend == "cuda":
        assert said["refused"] == said["probes"]
