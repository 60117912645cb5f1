"""The specification of a step, which the one in C++ passes as well (tests/runtime/torch_step/step_cases_test.cpp)."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from step_cases import FOLDER, CaseRuntime, cases, failing, lines, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", cases("python"), ids=lambda case: case["name"])
def test_a_step_is_as_it_is_specified(case, capfd):
    if case.get("refused"):
        with failing(case["error"]):
            trained(case, CaseRuntime(case))
        return
    undisturbed = trained(case, None).learned()
    runtime = CaseRuntime(case)
    training = trained(case, runtime)
    assert runtime.calls == lines(case["calls"])
    assert training.runs == case["runs"]
    stats = training.step.stats()
    assert {name: stats[name] for name in case["stats"]} == case["stats"]
    said = capfd.readouterr().err
    for words in case.get("said", []):
        assert said.count(words) == 1
    assert not (case.get("silent") and said)
    same = torch.equal if case.get("learned", "bits") == "bits" else torch.allclose
    assert all(map(same, training.learned(), undisturbed))
