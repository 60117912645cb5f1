"""An optimizer that runs before it is known whether its step counts, or on gradients where they lie, leaves no trace either."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from training_ways import WAYS, ByHand, Closure, Plain, Scaled, batch, network, same, sgd  # noqa: E402

import sluice  # noqa: E402
from sluice import _gradients, _update  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = {
    "AdamW": {"amsgrad": True}, "SGD": {"momentum": 0.9, "nesterov": True}, "Adagrad": {"lr_decay": 0.1}, "NAdam": {},
    "ASGD": {"t0": 2}, "RMSprop": {"centered": True}, "Rprop": {}, "RAdam": {}, "Adadelta": {}, "Adamax": {}, "Adafactor": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def test_an_optimizer_that_ran_for_nothing_is_as_it_was(name, foreach, monkeypatch):
    taken_back = []
    put_back = _update.HostState.put_back
    monkeypatch.setattr(_update.HostState, "put_back", lambda state: (taken_back.append(state), put_back(state)))

    class Way(Plain):
        samples = (12, 12, 7, 12, 12)  # the first two steps do not run it ahead

        def optimizer(self, model):
            made = getattr(torch.optim, name)(model.parameters(), lr=0.05, foreach=foreach, **OPTIMIZERS[name])
            self.scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
            return made

        def step(self, step, model, data):
            loss = super().step(step, model, data)
            self.scheduler.step()
            return loss

    runtime = ScriptedRuntime(AT_COMMIT, defer=True)
    disturbed = Way().train(runtime)
    assert runtime.dropped == disturbed["stats"]["discards"] > len(Way.samples)
    assert len(taken_back) == 3
    same(disturbed, Way().train(None))


@pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
def test_a_step_that_is_interrupted_while_it_waits_leaves_either_all_or_nothing(defer):
    def train(runtime, interrupted):
        torch.manual_seed(1)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        with sharing(runtime):
            step = sluice.Step(model, optimizer)
        for i in range(6):
            torch.manual_seed(i)
            data = batch(8)
            if i == interrupted and runtime is not None:
                runtime.interrupt = True
                with pytest.raises(KeyboardInterrupt):
                    step(lambda x, y: F.cross_entropy(model(x), y), *data)
            elif i != interrupted:
                step(lambda x, y: F.cross_entropy(model(x), y), *data)
        return [t.tolist() for t in model.parameters()], [v["step"].item() for v in optimizer.state.values()]

    if defer:  # the commit is dropped after all, so that the step has not happened
        runtime = ScriptedRuntime(AT_COMMIT, defer=True)
        assert train(runtime, 3) == train(None, 3)
        assert runtime.dropped >= 4
    else:  # it counts, as if the handler had run a moment later, but for the optimizer, which is not run ahead
        assert train(ScriptedRuntime(), 3) == train(None, 3)


def test_an_optimizer_that_cannot_be_known_runs_once():
    class Counting(torch.optim.SGD):
        runs = 0

        def step(self, closure=None):
            self.runs += 1
            return super().step(closure)

    def hooked(model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.runs = 0
        made.register_step_post_hook(lambda of, *_: setattr(of, "runs", of.runs + 1))
        return made

    for make in (lambda model: Counting(model.parameters(), lr=0.1), hooked):
        torch.manual_seed(1)
        model = network()
        optimizer = make(model)
        runtime = ScriptedRuntime(AT_COMMIT, defer=True)
        with sharing(runtime):
            step = sluice.Step(model, optimizer)
        for _ in range(5):
            step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
        assert runtime.dropped == 5 and optimizer.runs == 5


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("operator", [None, 5])
def test_gradients_that_are_used_where_they_lie_leave_no_trace(way, operator, monkeypatch):
    used = []
    take = _gradients.Gradients.take
    monkeypatch.setattr(_gradients.Gradients, "take",
                        lambda of, in_place=False: (used.append(in_place), take(of, in_place)))
    whole = type("Whole", (way,), {"micro_batch": None, "samples": (12, 12, 7, 12)})
    runtime = ScriptedRuntime(operator, serving=False)
    disturbed = whole().train(runtime)
    copies = issubclass(way, (ByHand, Closure, Scaled))  # what cannot be known to run once, and at once
    assert used == [False] * len(used) if copies else used == [False, False, True, True]
    assert set(runtime.left_behind) == {0}
    assert all(param.grad is None for param in disturbed["model"].parameters())
    same(disturbed, whole().train(None))


def test_an_optimizer_that_fails_on_gradients_where_they_lie_leaves_none():
    model = network()
    optimizer = sgd(model)
    runtime = ScriptedRuntime(serving=False)
    with sharing(runtime):
        step = sluice.Step(model, optimizer)
    for _ in range(3):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises((TypeError, RuntimeError)):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    assert all(param.grad is None for param in model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
    assert runtime.left_behind[-1] == 0 and step.stats()["steps"] == 4
