"""A child that is forked from a training process cannot train in its pool, and is told so."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
torch = pytest.importorskip("torch")

from forking import in_forked_child  # noqa: E402
from scripted_runtime import ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402

import sluice  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")  # else the rehearsal runs more than once

X = torch.ones(4, 3)


@pytest.fixture
def step():
    """One that shares."""
    model = nn.Linear(3, 2)
    with sharing(ScriptedRuntime()):
        return sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)


def loss_of(step):
    return lambda x: step.model(x).square().mean()


def test_a_forked_child_is_told_at_once(step):
    calls = []

    def loop():
        for micro in step.micro_batches(X):
            with micro as x:
                calls.append(x)

    def call():
        step(lambda x: calls.append(x), X)

    for way in (call, loop):
        said = in_forked_child(lambda: way() or "trained")
        assert said.startswith("SluiceError: this step was made before the process was forked") and "spawn" in said
        assert in_forked_child(lambda: str(step.stats()["steps"])) == "0"
    step(loss_of(step), X)


def test_a_child_that_is_forked_in_the_middle_of_a_step_ends_with_its_slice(step):
    calls, said, to_parent = [], [], []

    def forking(x):
        calls.append(x)
        if len(calls) == 2:  # after the rehearsal
            reading, writing = os.pipe()
            if child := os.fork():
                os.close(writing)
                with os.fdopen(reading) as told:
                    said.append(told.read())
                assert os.waitpid(child, 0)[1] == 0, said  # by its own number: orphans become children of this process
            else:
                to_parent.append(writing)
        return loss_of(step)(x)

    try:
        step(forking, X)
    except BaseException as why:
        if to_parent:
            os.write(to_parent[0], f"{len(calls)} {why}".encode())
        else:
            raise
    finally:
        if to_parent:
            os._exit(0)
    assert (len(calls), step.stats()["steps"]) == (3, 1)
    assert said[0].startswith("2 "), said
    assert "a forked child of a training process cannot train in the pool" in said[0]
