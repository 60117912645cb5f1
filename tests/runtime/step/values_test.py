"""What a loss function returns beside its loss counts each sample once, however often it runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402

import sluice  # noqa: E402
from sluice import _values  # noqa: E402

RUNTIMES = {
    "plain": lambda: None, "shared": ScriptedRuntime, "discarded": lambda: ScriptedRuntime(3),
    "discarded silently": lambda: ScriptedRuntime(3, silently=True),
    "dropped": lambda: ScriptedRuntime(AT_COMMIT, defer=True), "without a server": lambda: ScriptedRuntime(serving=False),
}
SAMPLES, SLICE = 11, 4


def made(runtime=None, optimizer=torch.optim.SGD, micro_batch=SLICE, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with sharing(runtime):
        return sluice.Step(model, optimizer(model.parameters(), lr=0.1), micro_batch, **options)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 3, generator=generator), torch.randint(2, (SAMPLES,), generator=generator)


def judged(step, **more):
    def loss_of(x, y):
        logits = step.model(x)
        right = logits.argmax(1) == y
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "right": right, "accuracy": right.float().mean(),
                "samples": len(x), **more}

    return loss_of


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_values_are_those_of_the_batch(runtime):
    runtime = runtime()
    step = made(runtime)
    x, y = data()
    assert step.values == {}
    for _ in range(4):
        expected = step.model(x).detach()
        loss = step(judged(step), x, y)
        assert loss.item() == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-6) and loss is step.loss
        values = step.values
        assert list(values) == ["logits", "right", "accuracy", "samples"]
        assert torch.allclose(values["logits"], expected, atol=1e-6) and not values["logits"].requires_grad
        assert torch.equal(values["right"], expected.argmax(1) == y)
        assert values["accuracy"].item() == pytest.approx(values["right"].float().mean().item())
        assert values["samples"] == pytest.approx((4 * 4 + 4 * 4 + 3 * 3) / SAMPLES)
    assert step.stats()["commits"] == 12
    if runtime is not None:
        assert set(runtime.left_behind) == {0}


@pytest.mark.parametrize("operator", [0, 1, 3, 6, 9, AT_COMMIT])
def test_values_are_the_same_bits_whatever_is_taken_away(operator):
    def values_of(runtime):
        step = made(runtime)
        result = []
        for _ in range(3):
            step(judged(step), *data())
            result.append({name: torch.as_tensor(value).tolist() for name, value in step.values.items()})
        return result

    assert values_of(ScriptedRuntime(operator)) == values_of(ScriptedRuntime(operator, defer=True)) == values_of(None)


def test_one_slice_gives_values_as_they_are():
    step = made(micro_batch=None)
    step(judged(step), *data())
    assert step.values["samples"] == SAMPLES and isinstance(step.values["samples"], int)


def test_a_loss_alone_leaves_no_values():
    step = made()
    step(judged(step), *data())
    step(lambda x, y: F.cross_entropy(step.model(x), y), *data())
    assert step.values == {}
    step(lambda x, y: {"loss": F.cross_entropy(step.model(x), y)}, *data())
    assert step.values == {}


def test_a_step_that_fails_leaves_the_values_of_the_last_one():
    step = made()
    step(judged(step), *data())
    before = step.values
    with pytest.raises(ZeroDivisionError):
        step(lambda x, y: 1 / 0, *data())
    assert step.values is before


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_scalars_beside_a_weight_are_averaged_by_it(runtime):
    step = made(runtime())
    x, y = data()
    counted = torch.ones(SAMPLES, dtype=torch.bool)
    counted[:SLICE], counted[-1] = False, False  # the first slice has nothing that counts

    def loss_of(x, y, counted):
        logits = step.model(x)[counted]
        return {"loss": F.cross_entropy(logits, y[counted]), "weight": counted.sum(),
                "accuracy": (logits.argmax(1) == y[counted]).float().mean()}

    expected = (step.model(x).argmax(1) == y)[counted].float().mean().item()
    step(loss_of, x, y, counted)
    assert list(step.values) == ["accuracy"] and step.values["accuracy"].item() == pytest.approx(expected)


def test_a_weight_on_a_device_leaves_its_slice_out_unread():
    share = torch.tensor([0.0, 0.25, 0.75]).unbind()  # what is known of such weights is tensors
    together = _values.mean([torch.tensor(float("nan")), torch.tensor(0.5), torch.tensor(1.0)], share)
    assert together.item() == pytest.approx(0.875)


def test_scalars_beside_a_sum_are_added_up_as_it_is():
    step = made(reduction="sum")

    def loss_of(x, y):
        logits = step.model(x)
        return {"loss": F.cross_entropy(logits, y, reduction="sum"), "right": (logits.argmax(1) == y).sum(), "seen": len(x)}

    x, y = data()
    expected = (step.model(x).argmax(1) == y).sum().item()
    step(loss_of, x, y)
    assert step.values["right"].item() == expected and step.values["seen"] == SAMPLES


@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_a_closure_gives_the_values_of_its_first_call(runtime):
    step = made(runtime(), torch.optim.LBFGS)
    x, y = data()
    expected = step.model(x).detach()
    step(judged(step), x, y)
    assert torch.allclose(step.values["logits"], expected, atol=1e-6)
    assert not torch.allclose(step.model(x), expected, atol=1e-3)


@pytest.mark.parametrize("more, kind, told", [
    ({"names": ["a"]}, TypeError, "returns 'names' as list"),
    ({"more": {"a": torch.ones(())}}, TypeError, "returns 'more' as dict"),
    ({"text": "a"}, TypeError, "returns 'text' as str"),
    ({"nothing": None}, TypeError, "returns 'nothing' as NoneType"),
    ({"weights": torch.ones(7, 2)}, TypeError, r"returns 'weights' as a tensor of shape \[7, 2\].*4 samples.*outside of the step"),
    ({"weight": torch.ones(4)}, TypeError, r"weight of a slice must be a number or a scalar tensor, not a tensor of shape \[4\]"),
])
@pytest.mark.parametrize("runtime", [None, ScriptedRuntime()], ids=["plain", "shared"])
def test_a_value_that_cannot_be_put_together_is_named(more, kind, told, runtime):
    step = made(runtime)
    before = step.model.weight.clone()
    with pytest.raises(kind, match=told):
        step(judged(step, **more), *data())
    assert torch.equal(before, step.model.weight)


def test_values_that_differ_from_slice_to_slice_are_named():
    step = made()
    before = step.model.weight.clone()
    with pytest.raises(ValueError, match="'last' with some slices alone"):
        step(lambda x, y: {"loss": step.model(x).mean(), **({"last": 1} if len(x) < SLICE else {})}, *data())
    with pytest.raises(ValueError, match=r"'out' is a number for one slice, and a row of shape \[\] for each sample for another"):
        step(lambda x, y: {"loss": step.model(x).mean(), "out": y if len(x) < SLICE else 1}, *data())
    with pytest.raises(ValueError, match=r"'out' is a row of shape \[4\].*and a row of shape \[3\]"):
        step(lambda x, y: {"loss": step.model(x).mean(), "out": x @ x.T}, *data())
    with pytest.raises(TypeError, match="'loss', and has only 'output', 'y'"):
        step(lambda x, y: {"output": step.model(x), "y": y}, *data())
    assert torch.equal(before, step.model.weight) and step.stats()["steps"] == 0


def test_an_output_beside_the_loss_wants_a_name():
    step = made()
    with pytest.raises(TypeError, match=r'a loss and a tensor of shape \[4, 2\].*"loss": loss'):
        step(lambda x, y: (step.model(x).mean(), step.model(x)), *data())
    with pytest.raises(TypeError, match=r'a loss and a dict.*"loss": loss'):
        step(lambda x, y: (step.model(x).mean(), {"a": 1}), *data())
    with pytest.raises(TypeError, match=r'has returned a list.*"loss": loss'):
        step(lambda x, y: [step.model(x).mean(), step.model(x)], *data())
