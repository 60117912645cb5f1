"""Activations that are computed again in backward in some micro-batches, and kept in others: what is learnt is the same."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sluice  # noqa: E402
from sluice import _planning  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLES, MICRO_BATCH, STEPS = 10, 3, 3


class Network(nn.Module):
    """Blocks with dropout, whose activations are computed again where that is on."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.last = nn.Linear(8, 4)
        self.reentrant = reentrant
        self.again = None
        self.switched = []

    def switch(self, again: bool) -> None:
        self.switched.append(again)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.again else block(x)
        return self.last(x)


def trained(runtime: ScriptedRuntime | None, reentrant: bool = False, **how):
    """A network after some steps, and the step that trained it."""
    torch.manual_seed(3)
    model = Network(reentrant)
    with sharing(runtime):
        step = sluice.Step(model, torch.optim.AdamW(model.parameters(), lr=0.1), MICRO_BATCH, recompute=model.switch, **how)
    for _ in range(STEPS):
        step(lambda x, y: F.cross_entropy(model(x), y), torch.randn(SAMPLES, 6), torch.randint(4, (SAMPLES,)))
    return model, step


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_in_plain_pytorch_activations_are_kept():
    model, step = trained(None)
    assert model.switched == [False]
    assert step.stats()["recomputed"] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_where_the_plan_says_so_they_are_computed_again_and_the_weights_are_the_same(reentrant):
    plain, _ = trained(None, reentrant)
    model, step = trained(ScriptedRuntime(), reentrant)
    assert same(model, plain)
    assert step.stats()["commits"] == 4 * STEPS
    assert step.stats()["recomputed"] == 2 * STEPS
    # The rehearsals see both ways.
    assert model.switched[:2] == [True, False]
    assert all(one != other for one, other in zip(model.switched, model.switched[1:]))
    assert model.again is False, "between steps"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("silently", [False, True])
def test_whatever_is_taken_away_of_either_kind_the_weights_are_the_same(reentrant, defer, silently):
    plain, _ = trained(None, reentrant)
    undisturbed = ScriptedRuntime()
    trained(undisturbed, reentrant)
    for operator in (*range(0, undisturbed.operators, 17), AT_COMMIT):
        runtime = ScriptedRuntime(operator, silently=silently, defer=defer)
        model, step = trained(runtime, reentrant)
        assert step.stats()["discards"] > 0
        assert step.stats()["recomputed"] > 0
        assert same(model, plain), operator


def test_a_switch_that_fails_is_called_again_and_nothing_has_been_trained():
    model = Network()
    before = [param.clone() for param in model.parameters()]
    calls = []

    def switch(again: bool) -> None:
        calls.append(again)
        if len(calls) == 1:
            raise RuntimeError("not now")
        model.switch(again)

    step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), recompute=switch)
    batch = torch.randn(4, 6), torch.randint(4, (4,))
    with pytest.raises(RuntimeError, match="not now"):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert calls == [False, False]
    assert step.stats()["steps"] == 1


class Otherwise(nn.Module):
    """A block that is not the same when it is computed again, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.again = how, False
        self.first, self.block = nn.Linear(6, 8), nn.Linear(8, 8)
        if how == "spectral norm":
            self.block = nn.utils.parametrizations.spectral_norm(self.block)
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True) if how == "instance norm" else nn.Identity()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.ones(8))
        self.drawn, self.nobody_knows = random.Random(1), random.Random(2)
        self.last = nn.Linear(8, 4)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "counter":
            self.count += 1
        if self.how == "average":
            self.average.lerp_(x.detach().mean(0), 0.001)
        if self.how == "numbers":
            x = x * self.drawn.random()
        if self.how == "unknown numbers":
            x = x * self.nobody_knows.random()
        return self.norm(torch.tanh(self.block(x)).unsqueeze(1)).squeeze(1) * self.average

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.how == "reentrant" else self.first(x)
        if self.how == "reentrant":
            x = F.pad(x, (0, 2))
        x = checkpoint(self.compute, x, use_reentrant=self.how == "reentrant") if self.again else self.compute(x)
        return self.last(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how, said", [
    ("reentrant", r"block.weight and 1 more are without a gradient where .* call it with use_reentrant=False"),
    ("numbers", r"generators\[0\] is drawn from once more where"),
    ("unknown numbers", r"the gradients are others where activations are computed again, by \d+ %"),
    ("counter", "count is changed by each forward pass, and once more where"),
    ("average", "average is changed by each forward pass"),
    ("spectral norm", r"block.parametrizations.weight.0._u and \d+ more are changed by each forward pass"),
    ("instance norm", r"norm.running_mean and \d+ more are changed by each forward pass")])
def test_what_would_train_otherwise_when_it_is_computed_again_is_refused_before_the_first_step(how, said):
    torch.manual_seed(4)
    model = Otherwise(how)
    before = [param.clone() for param in model.parameters()]

    def switch(again: bool) -> None:
        model.again = again

    with sharing(ScriptedRuntime()):
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, recompute=switch, generators=[model.drawn])
    batch = torch.randn(4, 6), torch.randint(4, (4,))
    with pytest.raises(sluice.SluiceError, match="recompute: " + said):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.again is False


def test_where_the_loss_function_minds_the_few_samples_of_the_comparison_activations_are_kept(capfd):
    model = Network()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) < MICRO_BATCH:
            raise ValueError("too few")
        return F.cross_entropy(model(x), y)

    with sharing(ScriptedRuntime()):
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), MICRO_BATCH, recompute=model.switch)
    for _ in range(2):
        step(loss_of, torch.randn(6, 6), torch.randint(4, (6,)))
    assert step.stats()["recomputed"] == 0
    assert model.again is False
    assert capfd.readouterr().err.count("sluice: recompute is left out: the loss function has failed") == 1


class LikeTransformers(nn.Linear):
    on = None

    def activation_checkpointing_enable(self, kwargs=None) -> None:
        self.on = True

    def activation_checkpointing_disable(self) -> None:
        self.on = False


class LikeOlderTransformers(nn.Linear):
    on = None

    def gradient_checkpointing_enable(self, kwargs=None) -> None:
        self.on = True

    def gradient_checkpointing_disable(self) -> None:
        self.on = False


class LikeTimm(nn.Linear):
    on = None

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.on = enable


@pytest.mark.parametrize("kind", [LikeTransformers, LikeOlderTransformers, LikeTimm])
def test_a_model_that_has_a_switch_of_its_own_is_asked_for_by_true(kind):
    model = kind(6, 4)
    with sharing(ScriptedRuntime()):
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, recompute=True)
    step(lambda x, y: F.cross_entropy(model(x), y), torch.randn(4, 6), torch.randint(4, (4,)))
    assert step.stats()["recomputed"] == 1  # the second of two
    assert model.on is False


def test_what_cannot_be_switched_is_refused():
    def step_of(model, recompute):
        return sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), recompute=recompute)

    with pytest.raises(TypeError, match=r"recompute=True needs a model with activation_checkpointing_enable.*Linear has none of them: give a function"):
        step_of(nn.Linear(2, 2), True)
    with pytest.raises(TypeError, match="recompute must be a function that takes True or False, or True, not str"):
        step_of(nn.Linear(2, 2), "always")
    with pytest.raises(ValueError, match="recompute cannot be used with batch normalisation"):
        step_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), print)
    step_of(nn.Linear(2, 2), False)


class Planned:
    """A runtime whose next micro-batch is to be as it says."""

    def __init__(self, recompute: bool) -> None:
        self.recompute = recompute
        self.started = []

    def plan_start(self, *how: int) -> int:
        self.started.append(how)
        return 0

    def plan(self, remaining: int) -> tuple[int, int, bool]:
        return remaining, 0, self.recompute


@pytest.mark.parametrize("may", [False, True])
def test_the_planner_is_told_whether_activations_can_be_computed_again(may):
    runtime = Planned(recompute=may)
    planner = _planning.Planner(runtime, adapt=False, together=False, may_recompute=may)
    assert planner.next(8, 8) == 8
    assert runtime.started == [(8, 1, int(may))]
    assert planner.recomputes is may
