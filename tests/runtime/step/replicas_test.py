"""Replicas of a model in several processes learn what one process learns that has all their samples."""

import contextlib
import gc
import sys
import weakref
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime" / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402

import torch.utils.checkpoint  # noqa: E402

import gloo_processes  # noqa: E402
from scripted_runtime import PatientRuntime, sharing  # noqa: E402

import sluice  # noqa: E402

RANKS = 2
STEPS = 4  # gradients are sent while backward runs from the third on
Parallel = nn.parallel.DistributedDataParallel


class Branches(nn.Module):
    """Of its branches one is used by every process, one by the first alone, one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.first, self.none = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return self.all(x) + (self.first(x) if first else 0.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def trained(module: nn.Module, part: slice, count: int, way: str) -> tuple[list[torch.Tensor], list[float]]:
    """The weights and losses of some steps on part of the samples."""
    losses = gloo_processes.losses_of(module, part, count, way, 2, STEPS)
    return [param.detach() for param in module.parameters()], losses


# --- what the processes do ----------------------------------------------------------------------------------------------------


def same_as_one(rank: int) -> None:
    for parts in ((6, 6), (7, 2)):
        count = sum(parts)
        part = slice(0, parts[0]) if rank == 0 else slice(parts[0], count)
        for way in ("mean", "weights", "sum"):
            for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
                mine, losses = trained(Parallel(model(), **options), part, count, way)
                one, expected = trained(model(), slice(0, count), count, way)
                assert losses == pytest.approx(expected, rel=1e-12), (way, parts)
                for param, wanted in zip(mine, one, strict=True):
                    torch.testing.assert_close(param, wanted, rtol=1e-11, atol=1e-13)
                    gloo_processes.expect_same_on_all(param)


def overlapping(rank: int) -> None:
    """Sent while backward runs, or after it: the same, bit by bit; and processes may do one or the other."""
    from sluice import _buckets, _replicas

    module = Parallel(model())
    step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    module(torch.ones(1, 4, dtype=torch.double)).sum().backward()  # somebody's own, before there was a micro-batch
    assert step._engine.processes.may_overlap
    started, sent = [], []
    start, send = _replicas.Replicas.start, _replicas._Reduction._send
    _replicas.Replicas.start = lambda *args: (started.append(1), start(*args))[1]
    _replicas._Reduction._send = lambda self: (sent.append(self._sent), send(self))[1]
    _buckets.BUCKET_BYTES = 64
    results = []
    for overlaps in (True, False, rank == 0):
        _replicas.Replicas.may_overlap = property(lambda _self, overlaps=overlaps: overlaps)
        started.clear()
        results.append(trained(Parallel(model()), slice(3 * rank, 3 * rank + 5), 8, "weights"))
        assert len(started) == (STEPS - 2 if overlaps else 0)
    assert len(set(sent)) > 2  # several pieces
    for weights, losses in results[1:]:
        assert losses == results[0][1]
        assert all(torch.equal(*pair) for pair in zip(weights, results[0][0], strict=True))


def nothing_outlives(_rank: int) -> None:
    """What is made to send gradients in a micro-batch does not live on in its memory."""
    with sharing(PatientRuntime(serving=False)) as runtime:
        trained(Parallel(model()), slice(0, 5), 5, "weights")
    assert runtime.left_behind == [0] * 3 * STEPS, runtime.left_behind


def freed(_rank: int) -> None:
    """Neither the step keeps a model nor the model a step that has gone."""
    module = Parallel(model())
    step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(STEPS):
        step(lambda x: module(x).square().mean(), torch.ones(2, 4, dtype=torch.double))
    kept = weakref.ref(module)
    first = next(module.parameters())
    del step
    gc.collect()
    assert not first._post_accumulate_grad_hooks
    del module, first
    gc.collect()
    assert kept() is None


def again(_rank: int) -> None:
    """Where backward comes to a parameter several times, nothing is sent before its end."""
    module = Parallel(model(), static_graph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = sluice.Step(module, optimizer)
    x = torch.ones(2, 4, dtype=torch.double, requires_grad=True)
    inner = module.module

    def loss_of(_):
        first = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True)
        return (torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True) + first).sum()

    for _ in range(STEPS):
        step(loss_of, torch.ones(2, 1))
    assert not step._engine.processes.may_overlap


def unused(rank: int) -> None:
    """Also where gradients are sent while backward runs, before it is known what it does not come to."""
    for runtime in (None, PatientRuntime(serving=False)):
        with sharing(runtime) if runtime else contextlib.nullcontext():
            torch.manual_seed(0)
            module = Parallel(Branches(), find_unused_parameters=True)
            before = {name: param.detach().clone() for name, param in module.module.named_parameters()}
            step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1))
            for turn in range(STEPS):
                step(lambda x: module(x, rank == 0).square().mean(), torch.ones(2, 4))
                after = dict(module.module.named_parameters())
                changed = {name for name in after if not torch.equal(after[name], before[name])}
                assert changed == {name for name in before if not name.startswith("none")}, turn
                gloo_processes.expect_same_on_all(torch.cat([param.detach().flatten() for param in after.values()]))


def thawed(rank: int) -> None:
    """Parameters that come and go between steps, in the middle of sending early."""
    part = slice(4 * rank, 4 * rank + 4)
    x, y, _ = gloo_processes.samples(8)
    results = []
    for module, mine in ((Parallel(model()), part), (model(), slice(0, 8))):
        step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.3))
        first = next(module.parameters())
        for turn in range(2 * STEPS):
            first.requires_grad_(turn % 4 != 3)
            step(lambda x, y, module=module: nn.functional.cross_entropy(module(x), y), x[mine], y[mine])
            assert (first.grad is None) and step._engine.counts["steps"] == turn + 1
        results.append([param.detach() for param in module.parameters()])
    for param, wanted in zip(*results, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-11, atol=1e-13)


def buffers(rank: int) -> None:
    torch.manual_seed(0)
    module = Parallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1), 4)
    calls = []
    sync = module._sync_buffers
    module._sync_buffers = lambda: (calls.append(1), sync())
    for _ in range(STEPS):
        step(lambda x: module(x).square().mean(), torch.randn(8, 4) + rank)
    assert len(calls) == STEPS  # once a step, however many micro-batches
    module.eval()
    gloo_processes.expect_same_on_all(module(torch.ones(1, 4)).detach())


def refused(_rank: int) -> None:
    module = Parallel(model())
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(sluice.SluiceError, match="leave register_comm_hook out"):
        sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    module = Parallel(model())
    step = sluice.Step(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="must not all be zero, in all processes"):
        step(lambda x: (module(x).sum(), 0.0), torch.ones(2, 4, dtype=torch.double))
    with pytest.raises(sluice.SluiceError, match="give all processes as many batches"), module.join():
        step(lambda x: module(x).sum(), torch.ones(2, 4, dtype=torch.double))


# --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bodies", [(same_as_one, overlapping, nothing_outlives), (unused, thawed, buffers, refused, again, freed)],
                         ids=gloo_processes.names)
def test_in_processes_that_train_together(tmp_path, bodies):
    gloo_processes.run(tmp_path, bodies, RANKS)
