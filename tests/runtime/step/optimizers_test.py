"""Optimizers that wrap others, or have little of what torch's have, are run as in plain PyTorch, or refused by name."""

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


class Bare(torch.optim.Optimizer):
    """Never calls what it inherits from."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param -= 0.1 * param.grad

class Lookahead(torch.optim.Optimizer):
    """Every second step goes half the way back."""

    def __init__(self, inner):
        self.inner = inner
        self.slow = [param.detach().clone() for group in inner.param_groups for param in group["params"]]
        self.steps = 0

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure) if closure is not None else self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            params = [param for group in self.param_groups for param in group["params"]]
            with torch.no_grad():
                for slow, param in zip(self.slow, params):
                    param.copy_(slow.lerp_(param, 0.5))


def accelerated(inner, scaler=None):
    pytest.importorskip("accelerate", reason="accelerate is not installed: see tests/requirements.txt")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    return AcceleratedOptimizer(inner, scaler=scaler)


def adam(params):
    return torch.optim.AdamW(params, lr=0.05)


def lbfgs(params):
    return torch.optim.LBFGS(params, max_iter=2)


MAKERS = {
    "bare": Bare, "lookahead": lambda params: Lookahead(adam(params)), "accelerate's": lambda params: accelerated(adam(params)),
    "accelerate's of a closure": lambda params: accelerated(lbfgs(params)),
    "lookahead of a closure": lambda params: Lookahead(lbfgs(params)),
}


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.randint(4, (12,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def trained(make, runtime, **options):
    model = network()
    with sharing(runtime):
        step = sluice.Step(model, make(model.parameters()), **options)
    losses = [step(lambda x, y: F.cross_entropy(model(x), y), *data()).item() for _ in range(6)]
    return losses, [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("options", [{}, {"micro_batch": 5, "clip_norm": 0.1}], ids=["whole", "slices, clipped"])
def test_any_optimizer_learns_what_it_learns_in_plain_pytorch(name, options):
    model = network()
    optimizer = MAKERS[name](model.parameters())
    losses = []

    def by_hand():
        model.zero_grad()
        loss = F.cross_entropy(model(data()[0]), data()[1])
        loss.backward()
        return loss

    expected = trained(MAKERS[name], None, **options)
    if not options:
        for _ in range(6):
            losses.append((optimizer.step(by_hand) if "closure" in name else (by_hand(), optimizer.step())[0]))
        if losses[0] is not None:  # these wrappers do not return what a closure has
            assert expected[0] == [loss.item() for loss in losses]
        assert expected[1] == [param.tolist() for param in model.parameters()]
    for make_runtime in (ScriptedRuntime, lambda: ScriptedRuntime(4), lambda: ScriptedRuntime(AT_COMMIT, defer=True),
                         lambda: ScriptedRuntime(serving=False)):
        assert trained(MAKERS[name], make_runtime(), **options) == expected


def test_accelerates_loop_is_trained_with_what_it_has_prepared():
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    def learned(runtime, shares):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model = network()
        optimizer = adam(model.parameters())
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, DataLoader(TensorDataset(*data()), 4, shuffle=True), torch.optim.lr_scheduler.StepLR(optimizer, 2))
        if shares:
            with sharing(runtime):
                step = sluice.Step(model, optimizer, clip_norm=1.0)
        for _ in range(3):
            for x, y in loader:
                if shares:
                    step(lambda x, y: F.cross_entropy(model(x), y), x, y)
                else:
                    optimizer.zero_grad()
                    accelerator.backward(F.cross_entropy(model(x), y))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                scheduler.step()
        return [param.tolist() for param in model.parameters()], scheduler.get_last_lr()

    alone = learned(None, False)
    assert learned(None, True) == learned(ScriptedRuntime(3), True) == alone


def test_accumulation_by_accelerate_is_refused():
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    with sharing(ScriptedRuntime()):
        step = sluice.Step(model, accelerator.prepare(adam(model.parameters())))
    before = model[0].weight.clone()
    with accelerator.accumulate(model):
        with pytest.raises(sluice.SluiceError, match="AcceleratedOptimizer leaves this step out.*accelerator.accumulate"):
            step(lambda x, y: F.cross_entropy(model(x), y), *data())
    with accelerator.accumulate(model):
        step(lambda x, y: F.cross_entropy(model(x), y), *data())
    assert not torch.equal(before, model[0].weight) and step.stats()["steps"] == 1


def test_a_wrapper_that_scales_by_itself_is_told_how_to_do_it():
    model = network()
    inner, scaler = adam(model.parameters()), torch.amp.GradScaler("cpu")
    wrapped = accelerated(inner, scaler)
    with pytest.raises(ValueError, match=r"AcceleratedOptimizer scales gradients by itself.*optimizer.optimizer.*scaler="):
        sluice.Step(model, wrapped)
    sluice.Step(model, wrapped.optimizer, scaler=wrapped.scaler)
    with pytest.raises(ValueError, match="cannot be used with an optimizer that calls a closure"):
        sluice.Step(model, accelerated(lbfgs(model.parameters())), scaler=scaler)


def test_what_is_no_optimizer_of_the_model_is_refused_by_name():
    class Ducklike:
        param_groups = []

        def step(self):
            pass

    class Nothing(torch.optim.Optimizer):
        def __init__(self):
            pass

        def step(self, closure=None):
            pass

    model, other = network(), network()
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer, not Ducklike; one that wraps another has to be a subclass"):
        sluice.Step(model, Ducklike())
    with pytest.raises(TypeError, match="Nothing has no param_groups"):
        sluice.Step(model, Nothing())
    with pytest.raises(ValueError, match="the optimizer has none of the parameters of the Sequential"):
        sluice.Step(model, adam(other.parameters()))
    optimizer = adam(model.parameters())
    model[0] = nn.Linear(6, 8)
    sluice.Step(model, optimizer)  # has the rest of it
    model[2] = nn.Linear(8, 4)
    with pytest.raises(ValueError, match="a new head"):
        sluice.Step(model, optimizer)


def test_an_optimizer_may_have_parameters_of_others_too():
    model, temperature = network(), nn.Parameter(torch.ones(()))
    step = sluice.Step(model, adam([*model.parameters(), temperature]))
    step(lambda x, y: F.cross_entropy(model(x) * temperature, y), *data())
    assert temperature.item() != 1.0
    prompt = nn.Parameter(torch.zeros(6))
    step = sluice.Step(model.requires_grad_(False), adam([prompt]))  # learned through a model that is frozen
    step(lambda x, y: F.cross_entropy(model(x + prompt), y), *data())
    assert prompt.abs().sum() > 0
