"""What a step of several micro-batches learns from, against arithmetic that is written down here: the whole batch."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from scripted_runtime import ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from training_ways import batch  # noqa: E402

import sluice  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def gradient_of(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


class Watching(torch.optim.SGD):
    """Remembers the gradients that it was given."""

    def step(self, closure=None):
        self.seen = [param.grad.clone() for param in self.param_groups[0]["params"] if param.grad is not None]


@pytest.mark.parametrize("runtime", [None, ScriptedRuntime(7)], ids=["plain", "disturbed"])
@pytest.mark.parametrize("kind", ["mean", "sum", "tokens", "tokens as numbers"])
def test_the_gradient_is_that_of_the_whole_batch(kind, runtime):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = torch.randn(11, 6).double(), torch.randint(4, (11,))
    y[:4] = torch.tensor([0, 0, 0, 1])

    def loss_fn(x, y):
        if kind == "mean":
            return F.cross_entropy(model(x), y)
        if kind == "sum":
            return F.cross_entropy(model(x), y, reduction="sum")
        weight = (y != 0).sum()
        return F.cross_entropy(model(x), y, ignore_index=0), weight if kind == "tokens" else weight.item()

    whole = loss_fn(x, y)
    whole = whole[0] if isinstance(whole, tuple) else whole
    expected = gradient_of(whole, model)
    optimizer = Watching(model.parameters(), lr=0.1)
    with sharing(runtime):
        step = sluice.Step(model, optimizer, 3, reduction="sum" if kind == "sum" else "mean")
    loss = step(loss_fn, x, y)
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(optimizer.seen, expected)


def test_the_norm_is_taken_of_the_whole_gradient_once():
    torch.manual_seed(1)
    model = nn.Linear(6, 4).double()
    x, y = torch.randn(8, 6).double(), torch.randint(4, (8,))
    expected = gradient_of(F.cross_entropy(model(x), y), model)
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in expected]))
    optimizer = Watching(model.parameters(), lr=0.1)
    step = sluice.Step(model, optimizer, 3, clip_norm=norm.item() / 2)
    step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    torch.testing.assert_close(step.grad_norm, norm)
    torch.testing.assert_close(optimizer.seen, [each / 2 for each in expected], rtol=1e-5, atol=1e-8)


def test_the_optimizers_hooks_find_the_norm_of_the_gradients_that_it_is_given():
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(step.grad_norm))
    step = sluice.Step(model, optimizer, clip_norm=0.1)
    for samples in (8, 4):
        step(lambda x, y: F.cross_entropy(model(x), y), *batch(samples))
        assert seen[-1] is step.grad_norm is not None


def test_what_is_frozen_again_keeps_no_room_for_its_gradients():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = Watching(model.parameters(), lr=0.1)
    sums = []
    optimizer.register_step_pre_hook(lambda *_: sums.append([StorageWeakRef(param.grad.untyped_storage()) for param in
                                                             optimizer.param_groups[0]["params"] if param.grad is not None]))
    with sharing(ScriptedRuntime()):
        step = sluice.Step(model, optimizer, 3)
    for frozen in (False, False, True):
        model[0].requires_grad_(not frozen)
        step(lambda x, y: F.cross_entropy(model(x), y), *batch(8))
        optimizer.seen = None
        assert [each.expired() for each in sums[0][:2]] == [frozen] * 2
    assert len(sums[-1]) == 2


def test_a_scale_that_is_too_large_leaves_the_step_out_and_backs_off():
    model = nn.Linear(6, 4)
    before = [param.clone() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    with sharing(ScriptedRuntime(4)):
        step = sluice.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, scaler=scaler)
    x, y = batch(8)
    loss = step(lambda x, y: F.cross_entropy(model(x), y) * 1e4, x, y)
    assert all(map(torch.equal, before, model.parameters())) and torch.isfinite(loss)
    assert scaler.get_scale() == 2.0**27
    step(lambda x, y: F.cross_entropy(model(x), y), x, y)
    assert not any(map(torch.equal, before, model.parameters()))
