"""The specification of a step, which the one in C++ passes as well (tests/runtime/torch_step/step_cases_test.cpp)."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from step_cases import FOLDER, CaseRuntime, cases, failing, lines, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(torch.optim.SGD):
    runs = 0

    def step(self, closure=None):
        self.runs += 1


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


def tensor(values: list[float | str]) -> torch.Tensor:
    return torch.tensor([float(value) for value in values])


@pytest.mark.parametrize("run", json.loads((FOLDER / "scaler_values.json").read_text()),
                         ids=lambda run: f"{len(run['steps'])} steps")
def test_a_gradient_scaler_has_these_values(run):
    """What the one for C++ is held against."""
    params = [nn.Parameter(torch.zeros(len(gradient))) for gradient in run["steps"][0]["gradients"]]
    optimizer = Counting(params, lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **run["options"])
    for step in run["steps"]:
        assert scaler.scale(torch.tensor(step["loss"])).item() == float(step["scaled"])
        for param, gradient in zip(params, step["gradients"], strict=True):
            param.grad = tensor(gradient)
        before = optimizer.runs
        scaler.unscale_(optimizer)
        for param, gradient in zip(params, step["unscaled"], strict=True):
            assert torch.isclose(param.grad, tensor(gradient), 0.0, 0.0, equal_nan=True).all()
        scaler.step(optimizer)
        scaler.update()
        assert (optimizer.runs > before) == step["runs"]
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (step["scale"], step["growth_tracker"])


def test_what_one_language_alone_has_is_what_the_documentation_says_that_differs():
    docs = (FOLDER.parents[2] / "docs" / "step.md").read_text()
    table = docs.partition("## In C++")[2].partition("\n## ")[0]
    rows = [row.replace("`", "") for row in re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)]
    shown = {case["row"] for language in ("python", "c++") for case in cases(language) if "only" in case}
    not_shown = set(json.loads((FOLDER / "differences.json").read_text()))
    assert not shown & not_shown
    assert sorted(shown | not_shown) == sorted(rows)
