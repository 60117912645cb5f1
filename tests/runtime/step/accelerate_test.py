"""A loop of accelerate's that shares learns what it learns alone: the same bits, whatever is taken away."""

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: see tests/requirements.txt")

import torch.nn.functional as F  # noqa: E402
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from scripted_runtime import AT_COMMIT, ScriptedRuntime, sharing  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import sluice  # noqa: E402
from sluice.integrations.accelerate import share  # noqa: E402

EPOCHS = 2


def forget_accelerators() -> None:
    """Those of one process share their state."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def quiet_and_alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    forget_accelerators()
    torch.set_num_threads(threads)


def accelerator_with(precision: str, accumulate: int, scale: float = 2.0**20) -> Accelerator:
    """On the processor accelerate knows no fp16; what it does with its scaler there is what it does on GPUs."""
    forget_accelerators()
    accelerator = Accelerator(cpu=True, mixed_precision="no" if precision == "fp16" else precision,
                              gradient_accumulation_steps=accumulate)
    if precision == "fp16":
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return accelerator


def mean(model, x, y):
    return F.cross_entropy(model(x), y)


def weighted(model, x, y):
    """Labels of class 0 do not count."""
    return F.cross_entropy(model(x), y, ignore_index=0), (y != 0).sum()


def named(model, x, y):
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    return {"loss": loss, "right": logits.argmax(1) == y, "again": loss.detach()}


def alone(accelerator, model, optimizer, loss_of):
    """What a loop does without."""
    def forward_backward(_loss_fn, x, y):
        result = loss_of(model, x, y)
        loss = result[0] if isinstance(result, tuple) else result["loss"] if isinstance(result, dict) else result
        accelerator.backward(loss)
        return loss.detach()

    return forward_backward


def train(micro_batch=3, runtime=None, shares=True, precision="no", accumulate=1, dropout=0.2, clip=None, loss_of=mean,
          optimizer_of=torch.optim.AdamW, zero_first=False, scale=2.0**20):
    """The loop as accelerate's documentation writes it."""
    accelerator = accelerator_with(precision, accumulate, scale)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
    optimizer = optimizer_of(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(TensorDataset(torch.randn(29, 6), torch.randint(4, (29,))), 8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms, skipped = [], [], []
    with sharing(runtime):
        shared = share(accelerator, model, optimizer, micro_batch) if shares else None
    forward_backward = shared or alone(accelerator, model, optimizer, loss_of)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                if zero_first:
                    optimizer.zero_grad()
                losses.append(forward_backward(lambda x, y: loss_of(model, x, y), x, y).item())
                if clip is not None and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                skipped.append(accelerator.optimizer_step_was_skipped)
                scheduler.step()
                if not zero_first:
                    optimizer.zero_grad()
    state = [v for entries in optimizer.state.values() for v in entries.values() if isinstance(v, torch.Tensor)]
    return {"bits": [tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *state]], "losses": losses,
            "norms": [str(norm) for norm in norms], "skipped": skipped, "rate": scheduler.get_last_lr(),
            "random": torch.get_rng_state().tolist(),
            "scale": accelerator.scaler.get_scale() if accelerator.scaler else None,
            "stats": shared.stats() if shared else {}}


WAYS = {
    "plain": {},
    "zeroed first": {"zero_first": True},
    "accumulation": {"accumulate": 2, "clip": 0.1},
    "bf16": {"precision": "bf16", "clip": 0.1},
    "fp16": {"precision": "fp16", "clip": 0.1, "accumulate": 2},
    "weights": {"loss_of": weighted, "accumulate": 3},
    "values": {"loss_of": named, "accumulate": 2},
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_losing_memory_leaves_no_trace(how):
    undisturbed = train(**how)
    for operator in (0, 21, AT_COMMIT):
        runtime = ScriptedRuntime(operator)
        disturbed = train(runtime=runtime, **how)
        stats = disturbed.pop("stats")
        assert stats["discards"] == stats["commits"] > 0
        assert disturbed == {key: value for key, value in undisturbed.items() if key != "stats"}
        assert set(runtime.left_behind) == {0}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_one_slice_a_batch_is_what_accelerate_computes_to_the_bit(how):
    plain = train(shares=False, **how)
    for runtime in (None, ScriptedRuntime(None)):
        whole = train(micro_batch=None, runtime=runtime, **how)
        assert whole.pop("stats")["commits"] == len(plain["losses"])
        assert whole == {key: value for key, value in plain.items() if key != "stats"}
    if how.get("precision") == "fp16":
        assert any(plain["skipped"]) and not all(plain["skipped"])


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_slices_add_up_to_what_accelerate_computes_alone(how):
    how = {**how, "dropout": 0.0, "optimizer_of": torch.optim.SGD, "scale": 2.0**8}
    plain, sliced = train(shares=False, **how), train(**how)
    assert sliced["stats"]["commits"] > sliced["stats"]["steps"] == len(plain["losses"])
    precise = 1e-5 if how.get("precision", "no") == "no" else 2e-2
    assert sliced["losses"] == pytest.approx(plain["losses"], rel=precise)
    assert list(map(float, sliced["norms"])) == pytest.approx(list(map(float, plain["norms"])), rel=precise, nan_ok=True)
    assert not any(sliced["skipped"]) and sliced["rate"] == plain["rate"]


def test_a_sum_is_one_over_the_batch():
    def summed(model, x, y):
        return F.cross_entropy(model(x), y, reduction="sum") / 8

    accelerator = accelerator_with("no", 1)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    gradients = []
    for reduction, loss_of in (("mean", mean), ("sum", summed)):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        forward_backward = share(accelerator, model, optimizer, 3, reduction=reduction)
        loss = forward_backward(lambda x, y, model=model, loss_of=loss_of: loss_of(model, x, y), x, y)
        gradients.append((loss, model.weight.grad.clone()))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_values_are_of_the_whole_batch():
    accelerator = accelerator_with("no", 1)
    model, optimizer = prepared(accelerator)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    values = []
    for micro_batch in (None, 3):
        forward_backward = share(accelerator, model, optimizer, micro_batch)
        assert forward_backward.values == {}
        loss = forward_backward(lambda x, y: named(model, x, y), x, y)
        assert forward_backward.values["right"].shape == (8,)
        values.append((loss, forward_backward.values))
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(values[1][1]["again"], values[0][0])


def test_a_step_takes_what_the_accelerator_has_prepared():
    bits = []
    for shares, runtime in ((False, None), (True, None), (True, ScriptedRuntime(21))):
        accelerator = accelerator_with("bf16", 1)
        torch.manual_seed(0)
        model, optimizer = prepared(accelerator)
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.5))
        with sharing(runtime):
            step = sluice.Step(model, optimizer, clip_norm=0.1) if shares else None
        for _ in range(4):
            x, y = torch.randn(8, 6), torch.randint(4, (8,))
            if shares:
                step(lambda x, y, model=model: mean(model, x, y), x, y)
            else:
                accelerator.backward(mean(model, x, y))
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        bits.append([param.detach().numpy().tobytes() for param in model.parameters()])
    assert bits[0] == bits[1] == bits[2]


def test_a_step_names_what_accumulates_and_scales_in_its_place():
    accelerator = accelerator_with("no", 2)
    model, optimizer = prepared(accelerator)
    step = sluice.Step(model, optimizer)
    with accelerator.accumulate(model), pytest.raises(sluice.SluiceError, match="sluice.integrations.accelerate.share"):
        step(lambda x: model(x).sum(), torch.randn(8, 6))
    model, optimizer = prepared(accelerator_with("fp16", 1))
    with pytest.raises(ValueError, match="AcceleratedOptimizer scales gradients by itself"):
        sluice.Step(model, optimizer)


def prepared(accelerator, model=None):
    """A model and its optimizer."""
    model = model or nn.Linear(6, 4)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [kind for kind in DistributedType
                                  if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)])
def test_processes_with_parts_of_a_model_are_refused_by_name(kind):
    accelerator = accelerator_with("no", 1)
    model, optimizer = prepared(accelerator)
    accelerator.state.distributed_type = kind
    with pytest.raises(sluice.SluiceError, match=f"share a model by {kind.value}, and sluice knows replicas"):
        share(accelerator, model, optimizer)


def test_a_model_on_several_devices_is_refused(tmp_path):
    accelerator = accelerator_with("no", 1)
    model = accelerate.dispatch_model(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), {"0": "cpu", "1": "disk"},
                                      main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    model, optimizer = prepared(accelerator, model)
    with pytest.raises(sluice.SluiceError, match="lies on cpu, disk .device_map., and sluice shares one device"):
        share(accelerator, model, optimizer)


def test_what_cannot_share_says_so():
    accelerator = accelerator_with("no", 1)
    model, optimizer = prepared(accelerator)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, kind, told in [
        (("accelerator", model, optimizer), TypeError, "takes an accelerate.Accelerator, not str"),
        ((accelerator, "model", optimizer), TypeError, "model must be a torch.nn.Module, not str"),
        ((accelerator, model, "optimizer"), TypeError, "optimizer must be a torch.optim.Optimizer, not str"),
        ((accelerator, model, optimizer, 0), ValueError, "micro_batch must be at least 1"),
        ((accelerator, model, plain), sluice.SluiceError, "what the accelerator has prepared"),
        ((accelerator, nn.Linear(6, 4), optimizer), sluice.SluiceError, "what the accelerator has prepared"),
    ]:
        with pytest.raises(kind, match=told):
            share(*arguments)
    with pytest.raises(ValueError, match='reduction must be "mean" or "sum"'):
        share(accelerator, model, optimizer, reduction="median")
    accelerator.has_lomo_optimizer = True
    with pytest.raises(sluice.SluiceError, match="LOMO updates parameters inside of backward"):
        share(accelerator, model, optimizer)


def test_wrong_calls_say_what_is_right():
    accelerator = accelerator_with("no", 1)
    model, optimizer = prepared(accelerator)
    forward_backward = share(accelerator, model, optimizer, 3)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    with pytest.raises(TypeError, match="the first argument is the loss function, not Tensor"):
        forward_backward(F.cross_entropy(model(x), y))
    with pytest.raises(TypeError, match="must be a scalar tensor"):
        forward_backward(lambda x, y: model(x), x, y)
    forward_backward(lambda x, y: mean(model, x, y), x, y)
    with pytest.raises(ValueError, match="either every batch between two steps of the optimizer brings a weight, or none"):
        forward_backward(lambda x, y: weighted(model, x, y), x, y)
    assert all(param.grad is None for param in model.parameters())
    with contextlib.suppress(ZeroDivisionError):
        forward_backward(lambda x, y: 1 / 0, x, y)
    assert all(param.grad is None for param in model.parameters())
