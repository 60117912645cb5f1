"""No side sees another's bytes, although training goes on using what was taken from it, and an engine is parked beside it.

On the host backend, and on the CUDA backend over the fake driver, which refuses what the real one refuses.
"""

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import isolation  # noqa: E402

HANDOVERS = int(os.environ.get("SLUICE_TEST_HANDOVERS", "200"))
FAULTS = 3
pytestmark = pytest.mark.deadline(900)


def over_the_fake_driver(build, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build / "lib" / "fake_driver"))


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_nobody_sees_the_other_sides_bytes(build, monkeypatch, capfd, backend):
    if backend == "cuda":
        over_the_fake_driver(build, monkeypatch)
    monkeypatch.setattr(isolation, "LOG_EVERY", 0.5)
    faults = FAULTS if backend == "cuda" else 0
    said = isolation.measure(backend, HANDOVERS, faults, build / "bin")
    print(said)
    assert said["handovers"] >= HANDOVERS
    assert said["faults"] == said["kernels"].total() == faults
    assert f" of {HANDOVERS} handovers, " in capfd.readouterr().err
    assert said["revocations"] > 0 and said["probes"] > 1000
    assert said["checked_bytes"] > 0 and said["granted_bytes"] > 0
    assert said["engine_parked"] > 0 and said["engine_granted_bytes"] > 0 and said["engine_checked_bytes"] > 0
    assert said["engine_refused"] == said["engine_probes"] > 100
    assert not any(said[name] for name in isolation.NEVER)
    if backend == "cuda":
        assert said["refused"] == said["probes"]


def test_a_run_ends_when_its_time_is_over(build):
    said = isolation.measure("host", 1_000_000, 0, build / "bin", seconds=10)
    assert 0 < said["handovers"] < 1_000_000
    assert 10 <= said["duration_s"] < 200


def test_a_role_that_gets_nowhere_ends_and_says_what_it_waited_for(build, monkeypatch):
    over_the_fake_driver(build, monkeypatch)
    monkeypatch.setattr(isolation, "PATIENCE", 10)
    monkeypatch.setenv("FAKE_CUDA_DELAY", "cuMemcpyDtoH_v2:60000000000")  # ns: longer than this test may take
    with pytest.raises(isolation.Failed) as why:
        isolation.measure("cuda", HANDOVERS, 0, build / "bin")
    message = str(why.value)
    assert "ended with status 1" in message
    assert re.search(r"got nowhere for 10 s; it waits for (the gate, or the device that copies and writes|memory of the pool)\. Now ", message), message
    assert "a client joins kind=training" in message  # the broker's log
    for role in ("server", "trainer 0", "trainer 1", "engine"):
        assert f"the {role} " in message


def test_a_run_is_added_to_a_record_of_the_same_tree_only(monkeypatch):
    records = pytest.importorskip("records")
    tree = {"commit": "a" * 40, "dirty": False}
    cell = {"params": {"handovers": 10}, "metrics": {"handovers": {"value": 7}}}
    monkeypatch.setattr(records, "tree", lambda: tree)
    monkeypatch.setattr(records, "record_of", lambda *_unused, **_more: {**tree, "cells": [cell]})
    assert isolation.earlier({"handovers": 10}, 0) == {"handovers": 7}
    assert isolation.earlier({"handovers": 11}, 0) == {}
    monkeypatch.setattr(records, "record_of", lambda *_unused, **_more: {**tree, "commit": "b" * 40, "cells": [cell]})
    with pytest.raises(SystemExit):
        isolation.earlier({"handovers": 10}, 0)
