"""Whatever a step is made of: losing memory at any operator leaves no trace in what is learned, bit by bit."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from training_ways import WAYS, Training, batch, network, same, same_batch, sgd  # noqa: E402

import sluice  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATORS = (0, 1, 5, 13, 27, 41, AT_COMMIT)


@pytest.fixture(scope="module")
def undisturbed():
    known = {}

    def of(way: type[Training]) -> dict:
        if way not in known:
            known[way] = way().train(None)
        return known[way]

    return of


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("silently", [False, True], ids=["raises", "silent"])
def test_losing_memory_leaves_no_trace(way, silently, undisturbed):
    for operator in OPERATORS:
        runtime = ScriptedRuntime(operator, silently)
        disturbed = way().train(runtime)
        assert disturbed["stats"]["discards"] == disturbed["stats"]["commits"] > len(way.samples)
        same(disturbed, undisturbed(way))
        assert set(runtime.left_behind) == {0}, "something made in a micro-batch outlives it"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_commit_that_is_dropped_when_its_turn_comes_leaves_no_trace(way, undisturbed):
    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    disturbed = way().train(runtime)
    assert disturbed["stats"]["discards"] == disturbed["stats"]["commits"] > len(way.samples)
    same(disturbed, undisturbed(way))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_sharing_alone_changes_nothing(way, undisturbed):
    same(way().train(ScriptedRuntime()), undisturbed(way))


class BackwardOfItsOwn(Training):
    """The loss function runs backward for a part of the loss by itself."""

    def loss(self, model, x, y):
        (model[0].weight.square().sum() * (len(x) * 0.01)).backward()
        return F.cross_entropy(model(x), y)


class Scripted(Training):
    """A part of the model is TorchScript."""

    def model(self):
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))), nn.Dropout(0.3),
                             nn.Linear(8, 4))


class WeightsMadeInForward(Training):
    """What the norms that are older than parametrizations make of the weight is an attribute of the module."""

    def model(self):
        spectral, weight = torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm
        return nn.Sequential(spectral(nn.Linear(6, 8)), nn.ReLU(), weight(nn.Linear(8, 8)), nn.Dropout(0.3), nn.Linear(8, 4))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("way", [BackwardOfItsOwn, Scripted, WeightsMadeInForward], ids=lambda way: way.__name__)
@pytest.mark.parametrize("operator", [None, 5, AT_COMMIT])
def test_unusual_losses_and_models_are_trained_as_without_sharing(way, operator):
    def by_hand():
        torch.manual_seed(3)
        model = way().model()
        optimizer = sgd(model)
        losses = []
        for samples in way.samples:
            optimizer.zero_grad()
            loss = way().loss(model, *same_batch(samples))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    whole = type("Whole", (way,), {"micro_batch": None})
    plain = whole().train(None)
    assert plain["losses"] == pytest.approx(by_hand(), rel=1e-6)
    same(whole().train(ScriptedRuntime(operator)), plain)
    same(whole().train(ScriptedRuntime(operator, defer=True)), plain)


def test_a_buffer_that_gets_another_name_is_put_back_under_it():
    model = network()
    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    with sharing(runtime):
        step = sluice.Step(model, sgd(model))
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    model.register_buffer("first", torch.zeros(2))
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    buffer = model._buffers.pop("first")
    model._buffers["second"] = buffer
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    assert "first" not in model._buffers and model._buffers["second"] is buffer
