"""What a loss function changes outside of the step's model is put back; weights and all state are the bits of plain PyTorch."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from outside_cases import CASES, Case, train  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime  # noqa: E402

OPERATORS = (None, 0, 3, 9, 17, 30, 55, AT_COMMIT)


pytestmark = pytest.mark.usefixtures("one_thread", "nothing_is_compiled")


@pytest.fixture(scope="module")
def plain():
    known = {}

    def of(case: type[Case]) -> list:
        if case not in known:
            known[case] = train(case, None)
        return known[case]

    return of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_losing_memory_leaves_no_trace_outside_of_the_model(case, plain):
    for operator in OPERATORS:
        for silently in (False, True):
            runtime = ScriptedRuntime(operator, silently)
            assert train(case, runtime) == plain(case), f"at {operator}, silently {silently}"
            assert set(runtime.left_behind) == {0}, "something made in a micro-batch outlives it"
            assert operator is None or runtime.discards > 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_commit_that_is_dropped_when_its_turn_comes_leaves_none_either(case, plain):
    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    assert train(case, runtime) == plain(case)
    assert runtime.discards > 4
