"""A model in shards (`fully_shard`) learns what torch learns by itself, and what is refused; see layouts_test.py, too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from torch import distributed, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402

import gloo_processes  # noqa: E402
from gloo_processes import samples  # noqa: E402
from layouts import EVERY, STEPS, disturbed, model, trained, whole  # noqa: E402
from scripted_runtime import PatientRuntime, sharing  # noqa: E402

import sluice  # noqa: E402
from sluice import _gradients, _shards  # noqa: E402

RANKS = 2


# --- what the processes do ----------------------------------------------------------------------------------------------------


def same_as_by_hand(rank: int) -> None:
    """And bit by bit what torch computes by itself, with equal parts in one slice."""
    part = slice(4 * rank, 4 * rank + 4)
    x, y, _ = (of[part] for of in samples(8))
    mine, losses = trained(model(), part, 8, size=None)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    for loss in losses:
        value = nn.functional.cross_entropy(module(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(value)
        assert loss == pytest.approx(value.item() / RANKS, rel=1e-15)
    assert all(torch.equal(*pair) for pair in zip(mine, whole(module), strict=True))


def without_a_server(rank: int) -> None:
    """The optimizer takes gradients where autograd has put them, in the commit, also beside a process that has a server."""
    part = slice(4 * rank, 4 * rank + 4)
    taken = []
    take = _gradients.Gradients.take
    _gradients.Gradients.take = lambda self, in_place=False: (taken.append(in_place), take(self, in_place))[1]
    results = []
    for serving in (True, False, rank == 0):
        for way in ("mean", "weights", "sum"):
            taken.clear()
            with disturbed(None, serving=serving) as runtime:
                results.append(trained(model(), part, 8, way, size=None, steps=5, clip_norm=1.0))
            assert taken == [False] * 2 + [not serving] * 3
            assert not any(runtime.left_behind)
    _gradients.Gradients.take = take
    for at, (weights, losses) in enumerate(results):
        expected, its = results[at % 3]
        assert losses == its
        assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))


def left_for_good(rank: int) -> None:
    """The training code's own exception ends a step; the next one is as if it had not been."""
    part = slice(4 * rank, 4 * rank + 4)
    x, y, _ = (of[part] for of in samples(8))
    results = []
    for breaks in (False, True):
        module = model()
        with disturbed(None):
            step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.3))
            step(lambda x, y: nn.functional.cross_entropy(module(x), y), x, y)
            if breaks:
                handle = module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    step(lambda x, y: nn.functional.cross_entropy(module(x), y), x, y)
                handle.remove()
            step(lambda x, y: nn.functional.cross_entropy(module(x), y), x, y)
        results.append(whole(module))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def after_an_evaluation(rank: int) -> None:
    """It leaves parameters gathered, which a step must neither train nor lose."""
    part = slice(4 * rank, 4 * rank + 4)
    x, y, _ = (of[part] for of in samples(8))
    results = []
    for evaluates in (False, True):
        module = model()
        with disturbed(20):
            step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.3))
            for _ in range(STEPS):
                if evaluates:
                    with torch.no_grad():
                        module(x)
                step(lambda x, y: nn.functional.cross_entropy(module(x), y), x, y)
        results.append(whole(module))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def in_low_precision(rank: int) -> None:
    """Gathered in bfloat16, scaled, and the norm clipped: as by hand."""
    x, y, _ = (of[4 * rank: 4 * rank + 4].float() if of.is_floating_point() else of[4 * rank: 4 * rank + 4] for of in samples(8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for by_hand in (False, True):
        module = model(None).float()
        mesh = init_device_mesh("cpu", (RANKS,))
        for each in (*module.blocks, module):
            fully_shard(each, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        step = sluice.Step(module, optimizer, scaler=scaler, clip_norm=0.5)
        for _ in range(STEPS):
            if not by_hand:
                step(lambda x, y: nn.functional.cross_entropy(module(x).float(), y), x, y)
                continue
            scaler.scale(nn.functional.cross_entropy(module(x).float(), y)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([*whole(module), torch.tensor(scaler.get_scale())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def refused(rank: int) -> None:
    def step(module: nn.Module, **how) -> sluice.Step:
        return sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1), **how)

    def train(module: nn.Module) -> None:
        step(module)(lambda x: module(x).sum(), torch.ones(2, 4, dtype=torch.double))

    with pytest.raises(sluice.SluiceError, match="leave adapt out"):
        step(model(), adapt=True)
    with sharing(PatientRuntime() if rank == 0 else None), pytest.raises(sluice.SluiceError, match="all under one `sluice run`"):
        step(model())
    some = DeviceMesh("cpu", [[0]], mesh_dim_names=("replicas", "shards"))
    if rank == 0:
        with pytest.raises(sluice.SluiceError, match="a mesh of all 2 processes of the job, but the largest has 1"):
            step(model(mesh=some))
    over_both = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "shards"))
    module = model()
    fully_shard(extra := nn.Linear(4, 4), mesh=over_both)
    module.extra = extra
    with pytest.raises(sluice.SluiceError, match="the same mesh everywhere"):
        step(module)
    module = model()
    module.set_requires_gradient_sync(False)
    with pytest.raises(sluice.SluiceError, match="leave set_requires_gradient_sync"):
        train(module)
    module = model()
    module.set_is_last_backward(False)
    with pytest.raises(sluice.SluiceError, match="leave set_is_last_backward"):
        train(module)
    module = model()
    with pytest.raises(ValueError, match="must not all be zero, in all processes"):
        step(module)(lambda x: (module(x).sum(), 0.0), torch.ones(2, 4, dtype=torch.double))
    with sharing(PatientRuntime()), pytest.raises(sluice.SluiceError, match="leave CPUOffloadPolicy out"):
        step(model(offload_policy=CPUOffloadPolicy(pin_memory=False)))


def not_taken_back(rank: int) -> None:
    """Were torch's modules left as they are, a try after one that was left in backward would go wrong."""
    part = slice(4 * rank, 4 * rank + 4)
    with disturbed(None) as undisturbed:
        trained(model(), part, 8, size=None, steps=2)
    _shards.Shards.reset = lambda self: None
    with disturbed(undisturbed.operators * 3 // 4), pytest.raises(sluice.Survivors):
        trained(model(), part, 8, size=None, steps=2)


def alone(_rank: int) -> None:
    """One process has all of every parameter, and nobody to ask."""
    with sharing(PatientRuntime()) as undisturbed:
        weights, losses = trained(model(), slice(0, 8), 8)
    assert not undisturbed.together
    assert losses == pytest.approx(trained(model(None), slice(0, 8), 8)[1], rel=1e-12)
    for operator in range(0, undisturbed.operators, 5 * EVERY):
        with sharing(PatientRuntime(operator)) as runtime:
            mine, its = trained(model(), slice(0, 8), 8)
        assert runtime.discards == 4 * STEPS
        assert its == losses and all(torch.equal(*pair) for pair in zip(mine, weights, strict=True)), operator


@pytest.mark.parametrize("bodies", [(same_as_by_hand, in_low_precision, refused),
                                    (without_a_server, left_for_good, after_an_evaluation, not_taken_back)], ids=gloo_processes.names)
def test_in_processes_that_train_together(tmp_path, bodies):
    gloo_processes.run(tmp_path, bodies, RANKS)


def test_in_one_process(tmp_path):
    gloo_processes.run(tmp_path, (alone,), 1)
